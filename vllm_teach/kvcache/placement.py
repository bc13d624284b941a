"""Where in the pool a sequence's blocks lie: anywhere, in one run, or in one run where that is easy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import BlockTable
from vllm_teach.kvcache.buddy import longest_run
from vllm_teach.kvcache.compaction import pack_in_order, relocate
from vllm_teach.kvcache.contiguous_placement import Contiguous
from vllm_teach.kvcache.prefer_contiguous import PreferContiguous

PLACEMENTS = ("scattered", "contiguous", "prefer_contiguous")

# The tables that hold blocks now.
Tables = Callable[[], Iterable[BlockTable]]
# What was in block b is in `blocks[b]` now: the manager updates the pool (`BlockPool.move`), the prefix cache, every
# table and its spare in place, and asks the storage for one transfer.
Move = Callable[[Mapping[int, int]], None]


class Placement(Protocol):
    """Chooses the blocks of tables. It takes them from the pool; the manager releases them, the spare ones included.

    For a copy on write of a table's last block the manager takes that block off the table, still holding it, and asks
    for one block more. If that fails it puts the block back; the block may have moved meanwhile.
    """

    pool: BlockPool

    @property
    def max_blocks(self) -> int:
        """The most blocks that one sequence, alone in the pool, can have."""

    def blocks_to_extend(self, table: BlockTable, count: int) -> int:
        """Return how many free blocks it takes to append `count` to `table`, those held in reserve included."""

    def extend(self, table: BlockTable, count: int) -> bool:
        """Append `count` blocks to `table`, which may move blocks of any table first.

        Changes nothing and returns False when fewer than `blocks_to_extend` are free; idle blocks are not free.
        """

    def compact(self) -> int:
        """Pack what is held or pinned to the pool's start; return how many blocks moved."""


class Scattered:
    """Appends the blocks that have been free for longest, wherever they are: what paging needs, and all it needs."""

    def __init__(self, num_blocks: int, tables: Tables, move: Move) -> None:
        self.pool = BlockPool(num_blocks)
        self._tables, self._move = tables, move

    @property
    def max_blocks(self) -> int:
        """All blocks."""
        return self.pool.num_blocks

    def blocks_to_extend(self, table: BlockTable, count: int) -> int:
        """Return `count`: nothing is held in reserve."""
        return count

    def extend(self, table: BlockTable, count: int) -> bool:
        """Append `count` blocks to `table`; nothing ever moves. Returns False if too few are free."""
        if count > self.pool.num_free:
            return False
        table.blocks += self.pool.take(count)
        return True

    def compact(self) -> int:
        """Pack the tables one behind the other, which serves only to be looked at; return how many blocks moved."""
        moves = pack_in_order(self.pool, self._tables())
        relocate(self.pool, moves, self._move)
        return len(moves)


def make_placement(
    placement: str, num_blocks: int, tables: Tables, move: Move, *, compact_above: float = 0.5
) -> Placement:
    """Return `placement` with a pool of `num_blocks` that keeps its free blocks as the placement needs them.

    `compact_above` is the external fragmentation above which "prefer_contiguous" compacts.
    """
    check_placement(placement)
    if placement == "contiguous":
        return Contiguous(num_blocks, tables, move)
    if placement == "prefer_contiguous":
        return PreferContiguous(num_blocks, tables, move, compact_above)
    return Scattered(num_blocks, tables, move)


def longest_sequence(placement: str, num_blocks: int) -> int:
    """Return `max_blocks` of a `placement` of `num_blocks` blocks (1 or more), before there is one."""
    return longest_run(num_blocks) if placement == "contiguous" else num_blocks


def check_placement(placement: str) -> None:
    """Raise InvalidArgumentError unless `placement` is one of PLACEMENTS."""
    if placement not in PLACEMENTS:
        raise InvalidArgumentError(f"placement={placement!r} is not known: give one of {', '.join(PLACEMENTS)}.")
