"""Blocks one behind the other where that is easy, scattered where it is not: nothing is rounded up or reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.buddy import BuddyAllocator
from vllm_teach.kvcache.compaction import pack_in_order, relocate
from vllm_teach.kvcache.fragmentation import consecutive_runs, external_fragmentation

if TYPE_CHECKING:
    from vllm_teach.kvcache.placement import Move, Tables


class PreferContiguous:
    """Appends the block behind the last one, if it is free; else a free run that is long enough; else any blocks.

    When a table would have to be continued elsewhere and the external fragmentation is above `compact_above` (0 to 1;
    1 means never), everything is packed first, with the free blocks behind this table. The fragmentation is 0 after
    that, so it does not happen at every step.
    """

    def __init__(self, num_blocks: int, tables: Tables, move: Move, compact_above: float) -> None:
        self._buddies = BuddyAllocator(num_blocks)
        self.pool = BlockPool(num_blocks, self._buddies)
        self._tables, self._move = tables, move
        self.compact_above = compact_above

    @property
    def max_blocks(self) -> int:
        """All blocks."""
        return self.pool.num_blocks

    def blocks_to_extend(self, table: BlockTable, count: int) -> int:
        """Return `count`: nothing is held in reserve."""
        return count

    def extend(self, table: BlockTable, count: int) -> bool:
        """Append `count` blocks to `table`; may move blocks of any table. Returns False if too few are free."""
        if count > self.pool.num_free:
            return False
        left = self._append_behind(table, count)
        if left and self._compact_first(table, left):
            left = self._append_behind(table, left)
        if left:
            table.blocks += self.pool.claim(self._take_elsewhere(left))
        return True

    def compact(self) -> int:
        """Pack the tables one behind the other; return how many blocks moved."""
        moves = pack_in_order(self.pool, self._tables())
        relocate(self.pool, moves, self._move)
        return len(moves)

    def _append_behind(self, table: BlockTable, count: int) -> int:
        """Append the blocks behind the table's last one as far as they are free; return how many are still missing."""
        while count and table.blocks and table.blocks[-1] != NO_BLOCK:
            block = table.blocks[-1] + 1
            if block == self.pool.num_blocks or not self._buddies.is_free(block):
                break
            table.blocks += self.pool.claim([self._buddies.take(block)])
            count -= 1
        return count

    def _compact_first(self, table: BlockTable, count: int) -> bool:
        """Pack everything if the free blocks are too fragmented for `table`; say whether that was done."""
        if not table.blocks and max(length for _, length in consecutive_runs(self._buddies)) >= count:
            return False
        if external_fragmentation(self._buddies) <= self.compact_above:
            return False
        relocate(self.pool, pack_in_order(self.pool, self._tables(), last=table), self._move)
        return True

    def _take_elsewhere(self, count: int) -> list[int]:
        """Take the start of the longest free run, where there is most room to go on, or else single blocks."""
        first, length = max(consecutive_runs(self._buddies), key=lambda run: run[1])
        if length >= count:
            return [self._buddies.take(block) for block in range(first, first + count)]
        return [self._buddies.take() for _ in range(count)]
