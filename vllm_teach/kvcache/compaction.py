"""Compaction: moving what is held together, so that what is free lies together, too.

The plan is a mapping, old block -> new block, and all of it takes place at once: the storage reads every source before
it writes a destination, and the tables change between two steps, never within one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable


@dataclass(frozen=True)
class Run:
    """Blocks that are to lie one behind the other, at the start of a run of `length` blocks (at least as many)."""

    blocks: tuple[int, ...]
    length: int


def by_size(runs: Iterable[Run]) -> list[Run]:
    """Sort `runs` so that, packed in this order from block 0, each power of two is aligned to its own length.

    All lengths before a run are multiples of its own, so its start is one, too, and no gap is needed: the runs fit
    exactly when their lengths add up to no more than the pool. Other lengths have no alignment and come last.
    """

    def key(run: Run) -> tuple[bool, int, tuple[int, ...]]:
        return bool(run.length & (run.length - 1)), -run.length, run.blocks

    return sorted(runs, key=key)


def pack(runs: Sequence[Run]) -> tuple[list[int], dict[int, int]]:
    """Put `runs` one behind the other from block 0 on.

    Returns the first block of each, and the moves that takes; what lies where it should does not move.
    """
    starts: list[int] = []
    moves: dict[int, int] = {}
    end = 0
    for run in runs:
        starts.append(end)
        moves.update((block, end + i) for i, block in enumerate(run.blocks) if block != end + i)
        end += run.length
    return starts, moves


def relocate(pool: BlockPool, moves: Mapping[int, int], move: Callable[[Mapping[int, int]], None]) -> None:
    """Carry out `moves` through `move`, to destinations that move away themselves or are free; sources become free."""
    if moves:
        destinations = set(moves.values())
        free = pool.take(pool.num_free)
        move(moves)
        for block in free:
            if block not in destinations:
                pool.release(block)


def loose_blocks(pool: BlockPool, tables: Iterable[BlockTable], placed: Iterable[int]) -> list[int]:
    """Return all blocks in use but for `placed`: those of `tables` in the order of their tokens, then the others."""
    seen = set(placed)
    in_tables = dict.fromkeys(block for table in tables for block in table.blocks if block != NO_BLOCK)
    others = (block for block in range(pool.num_blocks) if pool.holders(block) or pool.pins(block))
    return [block for block in dict.fromkeys((*in_tables, *others)) if block not in seen]


def pack_in_order(pool: BlockPool, tables: Iterable[BlockTable], last: BlockTable | None = None) -> dict[int, int]:
    """Return the moves that put each table's blocks one behind the other, without rounding; shared ones lie once.

    What is free comes behind `last`'s own blocks, so that it can grow there.
    """
    own = [block for block in last.blocks if block != NO_BLOCK and pool.holders(block) == 1] if last else []
    runs = [Run((block,), 1) for block in (*loose_blocks(pool, tables, own), *own)]
    return pack(runs)[1]
