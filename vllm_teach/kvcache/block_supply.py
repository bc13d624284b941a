"""Where tables get their blocks from, and what becomes of those they give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_teach.kvcache.block_table import BlockTable, without_holes
from vllm_teach.kvcache.events import Allocated, CacheEvent, Copied, Evicted, Freed, Moved, Shared
from vllm_teach.kvcache.placement import Placement
from vllm_teach.kvcache.prefix_cache import PrefixCache
from vllm_teach.kvcache.transfers import TransferList
from vllm_teach.kvcache.usage import CacheCounts


class BlockSupply:
    """Changes the blocks of tables: chosen by `placement`, made free by evictions from `prefix_cache` if need be.

    Whatever it does it also counts, tells as an event and, where content has to be copied, records as a transfer.
    """

    def __init__(
        self, placement: Placement, prefix_cache: PrefixCache | None, record: Callable[[CacheEvent], None]
    ) -> None:
        self.placement, self.prefix_cache, self.record = placement, prefix_cache, record
        self.pool = placement.pool
        self.transfers = TransferList()
        self.counts = CacheCounts()
        # Blocks that a table holds while they are not in it: a copy's source until the copy has its block.
        self._aside: list[int] = []

    def cost(self, table: BlockTable, count: int, copy_last: bool = False) -> int:
        """Return how many available blocks `append` would take now."""
        if not copy_last:
            return self.placement.blocks_to_extend(table, count)
        source = table.blocks.pop()
        cost = self.placement.blocks_to_extend(table, count + 1)
        table.blocks.append(source)
        return cost

    def append(self, seq_id: int, table: BlockTable, count: int, copy_last: bool = False) -> bool:
        """Append `count` blocks to `table`; with `copy_last` its last one becomes a copy of its own before.

        Idle blocks are evicted when free ones run out, and blocks of any table may move. Returns False, with nothing
        changed, when too few are available.
        """
        cost = self.cost(table, count, copy_last)
        if cost > self.pool.num_available:
            return False
        if cost > self.pool.num_free and self.prefix_cache is not None:
            self._evicted(self.prefix_cache.evict(cost - self.pool.num_free))
        if copy_last:
            self._aside.append(table.blocks.pop())
        start = len(table.blocks)
        self.placement.extend(table, count + copy_last)
        self.record(Allocated(seq_id, tuple(table.blocks[start:])))
        if copy_last:
            self._copy(seq_id, self._aside.pop(), table.blocks[start])
        return True

    def uncache(self, block: int) -> None:
        """Have the prefix cache forget `block`, which a table holds and is about to write to."""
        assert self.prefix_cache is not None  # nobody else pins
        self._evicted(self.prefix_cache.forget(block))

    def _evicted(self, blocks: list[int]) -> None:
        self.counts.evictions += len(blocks)
        if blocks:
            self.record(Evicted(tuple(blocks)))

    def move(self, moves: Mapping[int, int], tables: Sequence[BlockTable]) -> None:
        """Follow a compaction in all `tables` at once, and have the storage move what is in the blocks."""
        self.pool.move(moves)
        if self.prefix_cache is not None:
            self.prefix_cache.move(moves)
        reserved = {block for table in tables for block in table.spare}  # there is nothing in these
        for blocks in (self._aside, *(part for table in tables for part in (table.blocks, table.spare))):
            blocks[:] = [moves.get(block, block) for block in blocks]
        self.transfers.record("move", [pair for pair in moves.items() if pair[0] not in reserved])
        self.counts.moves += len(moves)
        self.record(Moved(tuple(moves.items())))

    def hold(self, seq_id: int, blocks: Sequence[int]) -> None:
        """One more table, that of `seq_id`, has `blocks`, which hold content already."""
        for block in blocks:
            self.pool.hold(block)
        if blocks:
            self.record(Shared(seq_id, tuple(blocks)))

    def release(self, seq_id: int, blocks: Sequence[int]) -> None:
        """The table of `seq_id` has `blocks` no more; they become free or idle in this order."""
        for block in blocks:
            self.pool.release(block)
        if blocks:
            self.record(Freed(seq_id, tuple(blocks)))

    def trim(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens."""
        kept = -(-num_tokens // table.block_size)
        surplus = table.blocks[kept:]
        del table.blocks[kept:]
        table.num_tokens = num_tokens
        self.release(seq_id, surplus[::-1])

    def empty(self, seq_id: int, table: BlockTable) -> None:
        """Give back all blocks, the tail first: a prefix is of use without its tail, and not the other way round."""
        for block in reversed(table.spare):
            self.pool.release(block)
        self.release(seq_id, without_holes(reversed(table.blocks)))
        table.blocks.clear()
        table.spare.clear()
        table.num_tokens = 0

    def _copy(self, seq_id: int, source: int, destination: int) -> None:
        """Have `source`, which the table gave up, copied to `destination`, which it has instead.

        The source may be free from now on: who takes it writes to it after this copy has been made.
        """
        self.transfers.record("copy", [(source, destination)])
        self.counts.copies += 1
        self.record(Copied(seq_id, source, destination))
        self.release(seq_id, [source])
