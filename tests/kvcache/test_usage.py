import pytest

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.swap_space import SwapSpace
from vllm_teach.kvcache.usage import CacheCounts, count_stored, measure_usage


def test_each_slot_counts_once() -> None:
    parent = BlockTable(4, [3, 5, 8], 12)
    child = BlockTable(4, [3, 5, 9], 10)
    assert count_stored([(parent, 9)]) == 9
    assert count_stored([(parent, 9), (child, 10)]) == 4 + 4 + 1 + 2
    assert count_stored([(parent, 6), (child, 7)]) == 4 + 3  # block 5: the fuller of the two counts
    assert count_stored([(BlockTable(4, [NO_BLOCK, 5], 8), 7)]) == 3
    assert count_stored([]) == 0


def test_the_figures_of_a_pool() -> None:
    pool = BlockPool(10)
    pool.take(6)
    pool.pin(4)
    for block in (4, 1):
        pool.release(block)
    counts = CacheCounts(hit_queries=50, hit_tokens=20, evictions=1, copies=2, moves=3, swapped_out=4, swapped_in=5)
    usage = measure_usage(pool, 4, [(BlockTable(4, [0, 2, 3], 12), 10)], SwapSpace(7), counts)
    assert (usage.num_blocks, usage.held_blocks, usage.idle_blocks, usage.free_blocks) == (10, 4, 1, 5)
    assert (usage.tokens_stored, usage.slots_held, usage.utilization) == (10, 16, 10 / 16)  # block 5 is in reserve
    assert usage.internal_fragmentation == 6 / 16
    assert usage.external_fragmentation == pytest.approx(1 / 5)  # free: 1, and 6 to 9
    assert usage.held_share == 0.4
    assert usage.hit_rate == 0.4
    assert (usage.evictions, usage.copies, usage.moves, usage.swapped_out, usage.swapped_in) == (1, 2, 3, 4, 5)
    assert (usage.num_host_blocks, usage.host_blocks_used) == (7, 0)


def test_an_empty_cache() -> None:
    usage = KVCacheManager(4).usage()
    assert (usage.utilization, usage.held_share, usage.hit_rate) == (1.0, 0.0, 0.0)
    assert (usage.internal_fragmentation, usage.external_fragmentation) == (0.0, 0.0)
