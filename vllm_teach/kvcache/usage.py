"""Figures of the KV cache: how much of it serves someone, what does not and why, and what was done so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.fragmentation import external_fragmentation, internal_fragmentation
from vllm_teach.kvcache.swap_space import SwapSpace


@dataclass
class CacheCounts:
    """What was done since the cache was made: tokens looked up and found in the prefix cache, and blocks by fate.

    Prompts that are recomputed after a preemption are looked up, too, and not counted: their hits are their own.
    """

    hit_queries: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    copies: int = 0
    moves: int = 0
    swapped_out: int = 0
    swapped_in: int = 0


@dataclass(frozen=True)
class CacheUsage:
    """A snapshot. Blocks are held (by a sequence), idle (kept for their content only) or free; these add up to all.

    `tokens_stored` are tokens computed and held, each slot counted once however many share it; `slots_held` are the
    held blocks' slots, those of blocks in reserve included. `hit_queries` and `hit_tokens` count tokens of prompts;
    `evictions`, `copies`, `moves`, `swapped_out` and `swapped_in` count blocks; these seven since the cache was made.
    """

    num_blocks: int
    held_blocks: int
    idle_blocks: int
    free_blocks: int
    tokens_stored: int
    slots_held: int
    internal_fragmentation: float
    external_fragmentation: float
    num_host_blocks: int
    host_blocks_used: int
    hit_queries: int
    hit_tokens: int
    evictions: int
    copies: int
    moves: int
    swapped_out: int
    swapped_in: int

    @property
    def utilization(self) -> float:
        """Tokens stored / slots held, 0 to 1 (1 if none is held)."""
        return self.tokens_stored / self.slots_held if self.slots_held else 1.0

    @property
    def held_share(self) -> float:
        """Held blocks / all blocks, 0 to 1."""
        return self.held_blocks / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """The share of the tokens looked up that was found, 0 to 1 (0 if none was looked up)."""
        return self.hit_tokens / self.hit_queries if self.hit_queries else 0.0


def count_stored(tables: Iterable[tuple[BlockTable, int]]) -> int:
    """Return how many slots hold a token, given each block table and how many tokens of its sequence are computed.

    A block in several tables counts once, with as many tokens as the fullest of them has in it.
    """
    stored: dict[int, int] = {}
    for table, num_computed in tables:
        size = table.block_size
        for block, end in zip(table.blocks, range(num_computed, 0, -size), strict=False):
            if block != NO_BLOCK:
                stored[block] = max(stored.get(block, 0), min(size, end))
    return sum(stored.values())


def measure_usage(
    pool: BlockPool,
    block_size: int,
    tables: Iterable[tuple[BlockTable, int]],
    swap_space: SwapSpace,
    counts: CacheCounts,
) -> CacheUsage:
    """Return the figures of this moment; `tables` is as in `count_stored`. Looks at each held and each free block."""
    stored, slots_held = count_stored(tables), pool.num_held * block_size
    return CacheUsage(
        num_blocks=pool.num_blocks,
        held_blocks=pool.num_held,
        idle_blocks=pool.num_idle,
        free_blocks=pool.num_free,
        tokens_stored=stored,
        slots_held=slots_held,
        internal_fragmentation=internal_fragmentation(stored, slots_held),
        external_fragmentation=external_fragmentation(pool.free),
        num_host_blocks=swap_space.num_blocks,
        host_blocks_used=swap_space.num_used,
        **asdict(counts),
    )


def renew_usage(before: CacheUsage, pool: BlockPool, swap_space: SwapSpace, counts: CacheCounts) -> CacheUsage:
    """Return the figures of this moment without a look at the blocks: what needs one is that of `before`.

    That is the tokens stored, the slots held and the fragmentation; where nothing is held the first three are known.
    """
    usage = replace(
        before,
        held_blocks=pool.num_held,
        idle_blocks=pool.num_idle,
        free_blocks=pool.num_free,
        host_blocks_used=swap_space.num_used,
        **asdict(counts),
    )
    return usage if pool.num_held else replace(usage, tokens_stored=0, slots_held=0, internal_fragmentation=0.0)
