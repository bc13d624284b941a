"""Free blocks in aligned runs of powers of two, which split and merge (Knowlton 1965; Knuth, TAOCP 1, section 2.5).

A run of 2^k blocks starts at a multiple of 2^k. Its buddy is the other half of the run twice as long: the same start
with bit k flipped. Two free buddies never stay apart, so what is free at any time has exactly one division into runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_teach.errors import InvalidArgumentError


def next_power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count` (1 or more)."""
    return 1 << (count - 1).bit_length()


def longest_run(num_blocks: int) -> int:
    """Return the longest run in `num_blocks` blocks (1 or more): the greatest power of two that is at most that."""
    return 1 << (num_blocks.bit_length() - 1)


class BuddyAllocator:
    """Keeps the free ones of the blocks `0 .. num_blocks - 1`, all of them at first; `num_blocks` may be any number.

    What is handed out comes back as whole runs, block by block, or in any mixture: only the free side is recorded.
    Serves as `FreeBlocks` of a BlockPool. Handing out and taking back a run are O(log num_blocks).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(f"num_blocks={num_blocks} is not valid: an allocator has at least one block.")
        self.num_blocks = num_blocks
        # For each k the starts of the free runs of 2^k blocks; a dict is a set that keeps its order, so that the same
        # calls always give the same blocks.
        self._starts: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        self._num_free = 0
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self.free_run(start, 1 << order)
                start += 1 << order

    def __len__(self) -> int:
        """Return how many blocks are free."""
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        """Yield the free blocks, in order."""
        for start, length in self.free_runs():
            yield from range(start, start + length)

    @property
    def largest_free_run(self) -> int:
        """The longest run that `allocate` could return now: a power of two, or 0."""
        return next((1 << order for order in reversed(range(len(self._starts))) if self._starts[order]), 0)

    def free_runs(self) -> list[tuple[int, int]]:
        """Return the free runs (start, length) as the buddies divide them, in order; neighbours may touch."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._starts) for start in starts)

    def is_free(self, start: int, length: int = 1) -> bool:
        """Whether the aligned run of `length` (a power of two) blocks from `start` on is free as a whole."""
        return self._run_around(start, length.bit_length() - 1) is not None

    def allocate(self, count: int) -> int:
        """Take a free run of the least power of two that is at least `count`; return its first block.

        It is split off the shortest run that is long enough. Raises InvalidArgumentError when there is none, though
        enough blocks may be free: ask `largest_free_run`.
        """
        if count < 1:
            raise InvalidArgumentError(f"count={count} is not valid: a run has at least one block.")
        order = next_power_of_two(count).bit_length() - 1
        for larger in range(order, len(self._starts)):
            if self._starts[larger]:
                start = next(reversed(self._starts[larger]))
                self._carve(start, larger, start, order)
                return start
        raise InvalidArgumentError(
            f"count={count} is longer than any free run (the longest is {self.largest_free_run}): "
            "free some blocks or compact."
        )

    def take(self, block: int | None = None) -> int:
        """Take the free block `block` alone, or any one out of the shortest run; return it.

        Raises InvalidArgumentError when it is not free.
        """
        if block is None:
            return self.allocate(1)
        self.take_run(block, 1)
        return block

    def take_run(self, start: int, length: int) -> None:
        """Take the aligned run of `length` (a power of two) blocks from `start` on.

        Raises InvalidArgumentError when it is not free as a whole, or not a run that buddies could be.
        """
        order = self._order(start, length)
        around = self._run_around(start, order)
        if around is None:
            raise InvalidArgumentError(f"start={start}, length={length}: these blocks are not all free, take others.")
        self._carve(*around, start, order)

    def give(self, block: int) -> None:
        """Take back the single block `block`. Raises InvalidArgumentError when it is free: it was freed twice."""
        self.free_run(block, 1)

    def free_run(self, start: int, length: int) -> None:
        """Take back the run of `length` (a power of two) blocks from `start` on; it merges with its free buddies.

        Raises InvalidArgumentError when any of it is free already, or when it is not a run that buddies could be.
        """
        order = self._order(start, length)
        if self._touches_free(start, order):
            raise InvalidArgumentError(f"start={start}, length={length}: blocks of this run are free already.")
        self._num_free += length
        while order + 1 < len(self._starts) and (start ^ 1 << order) in self._starts[order]:
            del self._starts[order][start ^ 1 << order]
            start &= ~(1 << order)
            order += 1
        self._starts[order][start] = None

    def _order(self, start: int, length: int) -> int:
        """Return k of a run of 2^k blocks after checking that it is one."""
        if length < 1 or length & (length - 1) or start % length or start < 0 or start + length > self.num_blocks:
            raise InvalidArgumentError(
                f"start={start}, length={length} is no run: give a power of two, aligned to itself, "
                f"among {self.num_blocks} blocks."
            )
        return length.bit_length() - 1

    def _run_around(self, start: int, order: int) -> tuple[int, int] | None:
        """Return (start, order) of the free run that contains this one, or None."""
        for larger in range(order, len(self._starts)):
            first = start >> larger << larger
            if first in self._starts[larger]:
                return first, larger
        return None

    def _touches_free(self, start: int, order: int) -> bool:
        """Whether any block of this run is free."""
        if self._run_around(start, order) is not None:
            return True
        end = start + (1 << order)
        return any(block in self._starts[k] for k in range(order) for block in range(start, end, 1 << k))

    def _carve(self, first: int, larger: int, start: int, order: int) -> None:
        """Take the run (start, order) out of the free run (first, larger); the halves that are left over stay free."""
        del self._starts[larger][first]
        self._num_free -= 1 << order
        while larger > order:
            larger -= 1
            half = start >> larger << larger
            self._starts[larger][half ^ 1 << larger] = None
