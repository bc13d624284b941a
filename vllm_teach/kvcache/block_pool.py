"""The physical blocks: which are free, and how many block tables hold each of the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from vllm_teach.errors import InvalidArgumentError


class FreeBlocks(Protocol):
    """Keeps the free blocks; decides which one goes out next."""

    def take(self) -> int:
        """Remove a free block and return it; there is one."""

    def give(self, block: int) -> None:
        """Take back a block."""

    def __len__(self) -> int:
        """Return how many are free."""

    def __iter__(self) -> Iterator[int]:
        """Yield the free blocks."""


class FreeQueue:
    """The block that became free first goes out first, each in O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = deque(range(num_blocks))

    def take(self) -> int:
        """Remove the block that has been free for longest and return it."""
        return self._queue.popleft()

    def give(self, block: int) -> None:
        """Put `block` at the end."""
        self._queue.append(block)

    def __len__(self) -> int:
        """Return how many are free."""
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        """Yield the free blocks, the next to go out first."""
        return iter(self._queue)


class BlockPool:
    """Counts, for each of `num_blocks` equal blocks, the block tables that hold it, and the pins of a prefix cache.

    A block is free (no table, no pin), held (by at least one table) or idle (only pinned: its content is kept for
    whoever may ask for it, and given up when room is needed). Holds no tensors; every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int, free: FreeBlocks | None = None) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(f"num_blocks={num_blocks} is not valid: a pool has at least one block.")
        self.num_blocks = num_blocks
        self.free = FreeQueue(num_blocks) if free is None else free
        self._holders = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Told each block that becomes idle, by the release that made it so; may unpin it there and then.
        self.on_idle: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds or pins."""
        return len(self.free)

    @property
    def num_idle(self) -> int:
        """Blocks that are pinned and in no table."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that no table holds: the free ones and those that can be made free."""
        return self.num_free + self.num_idle

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_available

    @property
    def longest_idle(self) -> int | None:
        """The block that has been idle for longest, or None."""
        return next(iter(self._idle), None)

    def holders(self, block: int) -> int:
        """Return how many block tables hold `block`."""
        return self._holders[block]

    def pins(self, block: int) -> int:
        """Return how many pins keep `block` from becoming free."""
        return self._pins[block]

    def take(self, count: int = 1) -> list[int]:
        """Take `count` free blocks, each now held once.

        Raises InvalidArgumentError when fewer are free; idle blocks are not free until they are unpinned.
        """
        if count > self.num_free:
            raise InvalidArgumentError(f"count={count} is more than the {self.num_free} free blocks: free some first.")
        return self.claim(self.free.take() for _ in range(count))

    def claim(self, blocks: Iterable[int]) -> list[int]:
        """Record that `blocks`, which the caller took out of `free` itself, are held once each; return them."""
        claimed = list(blocks)
        for block in claimed:
            self._holders[block] = 1
        return claimed

    def hold(self, block: int) -> None:
        """One more table holds `block`, which is held or pinned already."""
        if not self._holders[block] + self._pins[block]:
            raise InvalidArgumentError(f"block={block} is free: take it, so that nobody else does.")
        self._idle.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One table less holds `block`. Raises InvalidArgumentError when none does: it was freed twice."""
        if not self._holders[block]:
            raise InvalidArgumentError(f"block={block} is in no table: it was released more often than held.")
        self._holders[block] -= 1
        if not self._holders[block]:
            if self._pins[block]:
                self._idle[block] = None
                if self.on_idle is not None:
                    self.on_idle(block)
            else:
                self.free.give(block)

    def pin(self, block: int) -> None:
        """Keep `block`, which is held or pinned already, from becoming free."""
        if not self._holders[block] + self._pins[block]:
            raise InvalidArgumentError(f"block={block} is free: only what holds something can be kept.")
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """Undo one `pin`; a block without pins that no table holds becomes free."""
        if not self._pins[block]:
            raise InvalidArgumentError(f"block={block} has no pin: it was unpinned more often than pinned.")
        self._pins[block] -= 1
        if not self._pins[block] and not self._holders[block]:
            del self._idle[block]
            self.free.give(block)

    def move(self, blocks: Mapping[int, int]) -> None:
        """Follow a compaction: what was in block b is in `blocks[b]` now, and its holders and pins are, too.

        A destination moves away itself, or was taken for this and is in no table yet. What nothing moved to is free.
        """
        counts = [(self._holders[block], self._pins[block]) for block in blocks]
        for destination, (holders, pins) in zip(blocks.values(), counts, strict=True):
            self._holders[destination], self._pins[destination] = holders, pins
        destinations = set(blocks.values())
        for block in blocks:
            if block not in destinations:
                self._holders[block] = self._pins[block] = 0
                self.free.give(block)
        self._idle = OrderedDict.fromkeys(blocks.get(block, block) for block in self._idle)
