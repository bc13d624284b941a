"""Each sequence in one run of a power of two of blocks, which grows by doubling: what buddy allocation offers.

A sequence that can be read as one view needs no gathering. The price is what the PagedAttention paper says of such
allocators (Kwon et al. 2023, section 3.1): up to half of a run is held for tokens that may never come, and free runs
that are too short have to be joined by moving what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.buddy import BuddyAllocator, longest_run, next_power_of_two
from vllm_teach.kvcache.compaction import Run, by_size, loose_blocks, pack, relocate

if TYPE_CHECKING:
    from vllm_teach.kvcache.placement import Move, Tables


class Contiguous:
    """Keeps in one run the blocks at a table's end that no other table holds; the run's rest is the table's `spare`.

    Nothing else is recorded: which blocks those are follows from the table and the pool. Blocks that others share and
    idle ones are loose, which for moving is a run of one. A table grows into its spare; when that is used up, into the
    buddy of its run; else into a run twice as long elsewhere, to which its blocks move; and when no free run is long
    enough, all runs are packed. So it can grow exactly when enough blocks are free, wherever they are.
    """

    def __init__(self, num_blocks: int, tables: Tables, move: Move) -> None:
        self._buddies = BuddyAllocator(num_blocks)
        self.pool = BlockPool(num_blocks, self._buddies)
        self._tables, self._move = tables, move

    @property
    def max_blocks(self) -> int:
        """The longest run there is room for: a power of two."""
        return longest_run(self.pool.num_blocks)

    def blocks_to_extend(self, table: BlockTable, count: int) -> int:
        """Return how many free blocks it takes to append `count`: none while they fit into the spare."""
        if count <= len(table.spare):
            return 0
        run = self._next_run(table, count)
        return run.length - len(run.blocks) - len(table.spare)

    def extend(self, table: BlockTable, count: int) -> bool:
        """Append `count` blocks to `table`; moves blocks where that is needed. Returns False if too few are free."""
        if count > len(table.spare):
            run = self._next_run(table, count)
            if run.length - len(run.blocks) - len(table.spare) > self.pool.num_free:
                return False
            if not self._grow_in_place(table, run):
                self._grow_elsewhere(table, run)
        table.blocks += table.spare[:count]
        del table.spare[:count]
        return True

    def compact(self) -> int:
        """Pack all runs from block 0 on, the longest first; return how many blocks moved."""
        tables = list(self._tables())
        runs = [run for table in tables for run in self._runs(table)]
        loose = loose_blocks(self.pool, tables, (block for run in runs for block in run.blocks))
        _, moves = pack(by_size([*runs, *(Run((block,), 1) for block in loose)]))
        relocate(self.pool, moves, self._move)
        return len(moves)

    def _next_run(self, table: BlockTable, count: int) -> Run:
        """Return the run that `table` needs for `count` more blocks, with those of its blocks that belong into it.

        These are the blocks in its run by now; or, if that takes less room, all at its end that no other table holds,
        which came one by one (from a prefix cache, say). The second is what lets a sequence grow to `max_blocks`.
        """
        candidates = (self._consecutive(table), self._exclusive(table))
        runs = [Run(blocks, next_power_of_two(len(blocks) + count)) for blocks in candidates]
        return min(runs, key=lambda run: run.length - len(run.blocks))

    def _exclusive(self, table: BlockTable) -> tuple[int, ...]:
        """Return the blocks at the table's end, from the last one that another table holds on."""
        return self._tail(table, lambda block, after: self.pool.holders(block) == 1)

    def _consecutive(self, table: BlockTable) -> tuple[int, ...]:
        """Return those of the exclusive blocks that follow one another in memory up to the table's end."""
        return self._tail(table, lambda block, after: self.pool.holders(block) == 1 and after in (None, block + 1))

    def _tail(self, table: BlockTable, belongs: Callable[[int, int | None], bool]) -> tuple[int, ...]:
        """Return the last blocks of `table`, in order, as long as each `belongs` before the one after it."""
        tail: list[int] = []
        for block in reversed(table.blocks):
            if block == NO_BLOCK:
                continue
            if not belongs(block, tail[-1] if tail else None):
                break
            tail.append(block)
        return tuple(reversed(tail))

    def _runs(self, table: BlockTable) -> list[Run]:
        """Return what of `table` has to stay together as it is: its run with the spare.

        They are two where a block between them was given up, by a copy on write or for one with the same content.
        """
        blocks, spare = self._consecutive(table), tuple(table.spare)
        together = not blocks or not spare or blocks[-1] + 1 == spare[0]
        parts = [blocks + spare] if together else [blocks, spare]
        return [Run(part, len(part)) for part in parts if part]

    def _grow_in_place(self, table: BlockTable, run: Run) -> bool:
        """Take what is behind the table's blocks and spare, if the longer run is aligned and all that is free."""
        held = (*run.blocks, *table.spare)
        if not held or held[0] % run.length or held != tuple(range(held[0], held[0] + len(held))):
            return False
        rest = range(held[0] + len(held), held[0] + run.length)
        if rest.stop > self.pool.num_blocks or not all(self._buddies.is_free(block) for block in rest):
            return False
        table.spare += self.pool.claim(self._buddies.take(block) for block in rest)
        return True

    def _grow_elsewhere(self, table: BlockTable, run: Run) -> None:
        """Move the table's blocks to the start of a longer run; the rest of it is the spare. There is room."""
        for block in table.spare:
            self.pool.release(block)
        table.spare.clear()
        if self._buddies.largest_free_run >= run.length:
            start = self._buddies.allocate(run.length)
            new = self.pool.claim(range(start, start + run.length))
            if run.blocks:
                self._move(dict(zip(run.blocks, new, strict=False)))
            table.spare += new[len(run.blocks) :]
        else:
            start = self._pack_around(table, run)
            rest = range(start + len(run.blocks), start + run.length)
            table.spare += self.pool.claim(self._buddies.take(block) for block in rest)

    def _pack_around(self, table: BlockTable, run: Run) -> int:
        """Pack all runs, with `run` as long as it is to be; return its first block."""
        tables = [other for other in self._tables() if other is not table]
        runs = [run, *(part for other in tables for part in self._runs(other))]
        loose = loose_blocks(self.pool, (table, *tables), (block for part in runs for block in part.blocks))
        order = by_size([*runs, *(Run((block,), 1) for block in loose)])
        starts, moves = pack(order)
        relocate(self.pool, moves, self._move)
        return next(start for start, part in zip(starts, order, strict=True) if part is run)
