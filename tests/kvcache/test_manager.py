"""The paged cache, one rule at a time. `test_manager_stateful.py` has them all at once."""

from collections.abc import Sequence

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache import events
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.prefix_cache import tokens_of
from vllm_teach.kvcache.transfers import Transfer


def run(kv: KVCacheManager, seq_id: int, token_ids: Sequence[int], **options: bool) -> int:
    """Begin a sequence and compute all its tokens; return how many the cache had."""
    cached = kv.begin(seq_id, token_ids, **options)
    assert kv.extend(seq_id, len(token_ids))
    kv.commit(seq_id, len(token_ids), tokens_of(token_ids))
    return cached


def end(kv: KVCacheManager, seq_id: int, token_ids: Sequence[int]) -> None:
    kv.free(seq_id, tokens_of(token_ids), len(token_ids))


def test_slots_come_block_by_block() -> None:
    kv = KVCacheManager(4, 4)
    kv.begin(0, range(5))
    assert kv.pool.num_held == 0  # begin takes nothing
    assert kv.blocks_to_extend(0, 5) == 2
    assert kv.extend(0, 5)
    assert kv.table(0).blocks == [0, 1]
    assert [kv.extend(0, n) for n in (8, 9, 16, 3)] == [True] * 4
    assert kv.table(0).blocks == [0, 1, 2, 3]
    assert kv.table(0).num_tokens == 16
    assert not kv.extend(0, 17)
    assert kv.table(0).num_tokens == 16
    assert (kv.max_tokens, kv.can_ever_fit(16), kv.can_ever_fit(17)) == (16, True, False)


def test_contiguous_sequences_are_as_long_as_a_power_of_two() -> None:
    kv = KVCacheManager(12, 4, placement="contiguous")
    assert (kv.max_tokens, kv.can_ever_fit(32), kv.can_ever_fit(33)) == (32, True, False)


def test_a_table_stays_the_same_object() -> None:
    """The plan of a step refers to the list."""
    kv = KVCacheManager(6, 2, num_host_blocks=4)
    run(kv, 0, [1, 2, 3])
    blocks = kv.table(0).blocks
    kv.extend(0, 8)
    kv.compact()
    kv.drop(0, [0])
    kv.swap_out(0)
    kv.swap_in(0)
    assert kv.table(0).blocks is blocks
    assert blocks[0] == NO_BLOCK


@pytest.mark.parametrize("prefix_cache", [None, "hash", "radix"])
def test_the_first_write_to_a_shared_block_copies_it(prefix_cache: str | None) -> None:
    kv = KVCacheManager(8, 4, prefix_cache=prefix_cache)
    run(kv, 0, range(6))
    kv.fork(0, 1)
    assert kv.table(0).blocks == kv.table(1).blocks == [0, 1]
    assert kv.pool.num_held == 2
    assert (kv.blocks_to_extend(0, 6), kv.blocks_to_extend(0, 7)) == (0, 1)
    assert kv.extend(1, 7)
    assert kv.take_transfers() == (Transfer("copy", ((1, 2),)),)
    assert kv.extend(0, 7)  # it has the block for itself now
    assert kv.take_transfers() == ()
    assert (kv.table(0).blocks, kv.table(1).blocks) == ([0, 1], [0, 2])
    assert kv.usage().copies == 1


def test_full_blocks_are_never_copied() -> None:
    kv = KVCacheManager(8, 4)
    run(kv, 0, range(8))
    kv.fork(0, 1)
    assert kv.extend(0, 9)
    assert kv.extend(1, 9)
    assert kv.take_transfers() == ()
    assert (kv.table(0).blocks, kv.table(1).blocks) == ([0, 1, 2], [0, 1, 3])


def test_a_fork_does_not_share_what_is_not_computed() -> None:
    kv = KVCacheManager(8, 4)
    run(kv, 0, range(6))
    kv.extend(0, 16)  # of a step that failed
    kv.fork(0, 1)
    assert kv.table(0).blocks == kv.table(1).blocks == [0, 1]
    assert list(kv.pool.free) == [4, 5, 6, 7, 3, 2]
    assert kv.table(0).num_tokens == kv.table(1).num_tokens == 6
    assert kv.extend(0, 12)
    assert kv.take_transfers() == (Transfer("copy", ((1, 4),)),)


def test_a_cached_block_that_matches_in_part_is_copied() -> None:
    kv = KVCacheManager(8, 4, prefix_cache="radix")
    run(kv, 0, [1, 2, 3, 4, 5, 6])
    end(kv, 0, [1, 2, 3, 4, 5, 6])
    assert kv.begin(1, [1, 2, 3, 4, 5, 9]) == 5
    assert kv.table(1).blocks == [0, 1]
    assert kv.extend(1, 6)
    assert kv.take_transfers() == (Transfer("copy", ((1, 2),)),)
    kv.commit(1, 6, tokens_of([1, 2, 3, 4, 5, 9]))
    kv.free(1)
    assert kv.begin(2, [1, 2, 3, 4, 5, 6, 7]) == 6  # the original is as it was


def test_a_copy_counts_as_a_block() -> None:
    """Nothing changes when the copy's block is not there; a source that is only cached is idle afterwards."""
    kv = KVCacheManager(3, 4, prefix_cache="radix")
    run(kv, 0, [1, 2, 3, 4, 5, 6])
    kv.fork(0, 1)
    assert kv.blocks_to_extend(1, 9) == 2  # block 1 is copied, and one more
    assert not kv.extend(1, 9)
    assert (kv.table(1).blocks, kv.take_transfers()) == ([0, 1], ())
    end(kv, 0, [1, 2, 3, 4, 5, 6])
    assert kv.extend(1, 8)
    assert kv.table(1).blocks == [0, 2]
    assert (kv.pool.num_idle, kv.pool.num_free) == (1, 0)
    kv.commit(1, 8, tokens_of([1, 2, 3, 4, 5, 6, 7, 8]))
    assert kv.extend(1, 9)
    assert kv.table(1).blocks == [0, 2, 1]


@pytest.mark.parametrize("placement", ["scattered", "contiguous", "prefer_contiguous"])
def test_in_a_full_pool_the_prefix_cache_gives_up_a_block_that_its_holder_writes_to(placement: str) -> None:
    """A sibling that ends leaves its half block in the radix cache: the one that goes on need not stop for a copy."""
    kv = KVCacheManager(2, 4, prefix_cache="radix", placement=placement)
    run(kv, 0, [1, 2, 3, 4, 5, 6])
    kv.fork(0, 1)
    end(kv, 1, [1, 2, 3, 4, 5, 6])
    assert kv.blocks_to_extend(0, 7) == 0
    assert kv.extend(0, 7)
    assert kv.take_transfers() == ()
    assert kv.pool.pins(kv.table(0).blocks[1]) == 0
    kv.commit(0, 7, tokens_of([1, 2, 3, 4, 5, 6, 7]))
    end(kv, 0, [1, 2, 3, 4, 5, 6, 7])
    assert kv.begin(2, [1, 2, 3, 4, 5, 6, 7, 8]) == 7  # what it wrote is cached in its turn


def test_the_last_token_is_never_a_hit() -> None:
    kv = KVCacheManager(8, 4)
    assert [run(kv, i, range(8)) for i in range(2)] == [0, 4]
    assert run(kv, 2, range(9)) == 8


def test_blocks_that_are_not_computed_are_no_hits() -> None:
    kv = KVCacheManager(8, 4)
    kv.begin(0, range(9))
    kv.extend(0, 9)
    assert kv.begin(1, range(9)) == 0
    kv.commit(0, 4, tokens_of(range(9)))
    assert kv.begin(2, range(9)) == 4


def test_a_block_that_was_computed_twice_is_given_back() -> None:
    kv = KVCacheManager(8, 4)
    for i in range(2):
        kv.begin(i, range(9))
        kv.extend(i, 9)
    for i in range(2):
        kv.commit(i, 9, tokens_of(range(9)))
    assert (kv.table(0).blocks, kv.table(1).blocks) == ([0, 1, 2], [0, 1, 5])
    assert kv.pool.num_held == 4


@pytest.mark.parametrize("placement", ["contiguous", "prefer_contiguous"])
def test_elsewhere_it_stays_where_its_sequence_is(placement: str) -> None:
    kv = KVCacheManager(8, 4, placement=placement)
    for i in range(2):
        kv.begin(i, range(9))
        kv.extend(i, 9)
    for i in range(2):
        kv.commit(i, 9, tokens_of(range(9)))
    assert not set(kv.table(0).blocks) & set(kv.table(1).blocks)


def test_salts_and_the_wish_not_to_share_keep_sequences_apart() -> None:
    kv = KVCacheManager(12, 4)
    run(kv, 0, range(9))
    assert kv.begin(1, range(9), salt="other") == 0
    assert kv.begin(2, range(9), share=False) == 0
    assert kv.begin(3, range(9)) == 8


def test_recomputation_is_not_in_the_hit_statistics() -> None:
    kv = KVCacheManager(12, 4)
    run(kv, 0, range(9))
    run(kv, 1, range(9))
    run(kv, 2, range(9), count=False)
    run(kv, 3, range(9), share=False)
    usage = kv.usage()
    assert (usage.hit_queries, usage.hit_tokens, usage.hit_rate) == (18, 8, 8 / 18)


def test_no_more_is_evicted_than_is_needed() -> None:
    kv = KVCacheManager(6, 4)
    run(kv, 0, range(20))
    end(kv, 0, range(20))
    assert (kv.pool.num_idle, kv.pool.num_free) == (5, 1)
    kv.begin(1, range(100, 112))
    assert kv.extend(1, 12)
    assert kv.usage().evictions == 2
    assert kv.begin(2, range(20)) == 12  # its tail went first


def test_a_match_is_not_evicted_for_the_rest_of_its_own_prompt() -> None:
    kv = KVCacheManager(4, 4)
    run(kv, 0, range(16))
    end(kv, 0, range(16))
    assert kv.begin(1, [*range(8), *range(50, 58)]) == 8
    assert kv.extend(1, 16)
    assert kv.table(1).blocks[:2] == [0, 1]
    assert set(kv.table(1).blocks[2:]) == {2, 3}


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_freed_sequence_leaves_its_head_longest(prefix_cache: str) -> None:
    kv = KVCacheManager(4, 4, prefix_cache=prefix_cache)
    run(kv, 0, range(16))
    kv.free(0)
    for need, left in ((1, 12), (2, 8), (3, 4)):
        kv.begin(1, range(100, 116))
        kv.extend(1, 4 * need)
        kv.free(1)
        assert kv.begin(2, range(17)) == left
        kv.free(2)


def test_a_freed_sequence_leaves_no_lock() -> None:
    """A locked leaf could not be evicted before other prefixes."""
    kv = KVCacheManager(4, 4, prefix_cache="radix", eviction="lru")
    run(kv, 0, [1] * 8)
    kv.free(0)
    run(kv, 1, [2] * 8)
    kv.free(1)
    kv.begin(2, [3] * 4)
    kv.extend(2, 4)
    assert kv.begin(3, [2] * 9) == 8
    assert kv.begin(4, [1] * 9) == 4


def test_reset_forgets_what_was_computed() -> None:
    kv = KVCacheManager(8, 4)
    run(kv, 0, range(8))
    run(kv, 1, range(8))
    end(kv, 1, range(8))
    kv.reset_prefix_cache()
    assert kv.table(0).blocks == [0, 1]
    assert kv.pool.num_idle == 0
    assert kv.begin(2, range(8)) == 0


def test_free_ends_a_sequence_in_any_state() -> None:
    kv = KVCacheManager(8, 4, prefix_cache=None, num_host_blocks=4)
    kv.free(9)
    run(kv, 0, range(9))
    kv.fork(0, 1)
    kv.begin(2, range(9))
    kv.swap_out(1)
    for seq_id in range(3):
        kv.free(seq_id)
        assert not kv.has(seq_id)
    assert (kv.pool.num_free, kv.usage().host_blocks_used) == (8, 0)


def test_dropped_blocks_leave_holes() -> None:
    kv = KVCacheManager(8, 4, prefix_cache=None, num_host_blocks=4)
    run(kv, 0, range(14))
    kv.drop(0, [0, 2])
    kv.drop(0, [0])
    assert kv.table(0).blocks == [NO_BLOCK, 1, NO_BLOCK, 3]
    assert list(kv.pool.free) == [4, 5, 6, 7, 2, 0]
    kv.fork(0, 1)
    assert kv.swap_out(1)
    assert kv.usage().host_blocks_used == 2
    assert kv.swap_in(1)
    assert kv.table(1).blocks == [NO_BLOCK, 4, NO_BLOCK, 5]
    kv.free(0)
    kv.free(1)
    assert kv.pool.num_free == 8


def test_out_and_in_again() -> None:
    kv = KVCacheManager(4, 4, num_host_blocks=3)
    run(kv, 0, range(6))
    kv.extend(0, 16)  # of a step that failed: what it was for is not copied
    assert kv.swap_out(0)
    assert kv.has(0)
    assert kv.table(0).blocks == []
    assert (kv.pool.num_available, kv.usage().host_blocks_used) == (4, 2)
    run(kv, 1, range(100, 112))
    assert not kv.swap_in(0)
    kv.free(1)
    assert kv.swap_in(0)
    blocks = kv.table(0).blocks
    assert kv.table(0).num_tokens == 6
    assert kv.take_transfers() == (
        Transfer("swap_out", ((0, 0), (1, 1))),
        Transfer("swap_in", ((0, blocks[0]), (1, blocks[1]))),
    )
    usage = kv.usage()
    assert (usage.swapped_out, usage.swapped_in, usage.host_blocks_used) == (2, 2, 0)


def test_what_was_shared_lies_on_the_host_once_for_each() -> None:
    kv = KVCacheManager(4, 4, num_host_blocks=3)
    run(kv, 0, range(6))
    kv.fork(0, 1)
    assert kv.swap_out(0)
    assert kv.table(1).blocks == [0, 1]  # goes on where it is
    assert not kv.swap_out(1)
    assert kv.table(1).blocks == [0, 1]
    assert kv.usage().host_blocks_used == 2


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_sequence_that_was_swapped_goes_on_being_indexed(prefix_cache: str) -> None:
    kv = KVCacheManager(8, 4, prefix_cache=prefix_cache, num_host_blocks=4)
    run(kv, 0, range(6))
    kv.swap_out(0)
    kv.swap_in(0)
    kv.extend(0, 12)
    kv.commit(0, 12, tokens_of(range(12)))
    assert kv.begin(1, range(13)) == 12


def test_compaction_moves_all_tables_at_once() -> None:
    kv = KVCacheManager(8, 4)
    run(kv, 0, range(8))
    run(kv, 1, range(100, 106))
    kv.fork(1, 2)
    end(kv, 0, range(8))
    kv.reset_prefix_cache()
    assert kv.table(1).blocks == [2, 3]
    assert kv.compact() == 2
    assert kv.table(1).blocks == kv.table(2).blocks == [0, 1]
    assert kv.take_transfers() == (Transfer("move", ((2, 0), (3, 1))),)
    assert kv.compact() == 0


def test_what_a_compaction_moves_is_still_found() -> None:
    kv = KVCacheManager(8, 4)
    run(kv, 0, range(8))
    run(kv, 1, range(100, 108))
    kv.free(0)
    kv.compact()
    for seq_id, start in ((2, 0), (3, 100)):
        assert kv.begin(seq_id, range(start, start + 9)) == 8
    assert kv.table(3).blocks == kv.table(1).blocks == [0, 1]
    assert kv.table(2).blocks == [2, 3]


def test_a_copys_source_may_move_while_its_block_is_found() -> None:
    """The copy and the block behind it need a run of two, for which all is packed first."""
    kv = KVCacheManager(4, 2, placement="contiguous", prefix_cache=None)
    for seq_id in range(4):
        run(kv, seq_id, [seq_id])
    home = {kv.table(seq_id).blocks[0]: seq_id for seq_id in range(4)}
    kv.free(home[0])
    kv.free(home[2])
    first, last = home[1], home[3]
    kv.fork(first, 4)
    contents: dict[int, int] = dict(home)
    assert kv.extend(4, 3)
    transfers = kv.take_transfers()
    assert [transfer.kind for transfer in transfers] == ["move", "copy"]
    for transfer in transfers:
        contents |= {b: word for (_, b), word in [(pair, contents[pair[0]]) for pair in transfer.pairs]}
    assert transfers[0].pairs == ((1, kv.table(first).blocks[0]),)
    assert transfers[1].pairs == ((kv.table(first).blocks[0], kv.table(4).blocks[0]),)
    assert [contents[kv.table(seq_id).blocks[0]] for seq_id in (first, last, 4)] == [first, last, first]
    assert kv.table(4).contiguous


def test_events_say_what_happened() -> None:
    told: list[events.CacheEvent] = []
    kv = KVCacheManager(6, 4, num_host_blocks=4, record=told.append)
    run(kv, 0, range(6))
    kv.fork(0, 1)
    kv.extend(1, 7)
    kv.swap_out(1)
    kv.swap_in(1)
    kv.free(0)
    assert kv.begin(2, range(6)) == 4
    kv.free(1)
    kv.compact()
    assert told == [
        events.Allocated(0, (0, 1)),
        events.Shared(1, (0, 1)),
        events.Allocated(1, (2,)),
        events.Copied(1, 1, 2),
        events.Freed(1, (1,)),
        events.SwappedOut(1, 2),
        events.Freed(1, (2, 0)),
        events.Allocated(1, (3, 4)),
        events.SwappedIn(1, 2),
        events.Freed(0, (1, 0)),
        events.Shared(2, (0,)),
        events.PrefixHit(2, 4, 6),
        events.Freed(1, (4, 3)),
    ]
    kv.free(2)
    told.clear()
    kv.begin(3, range(100, 124))
    kv.extend(3, 24)
    assert told == [events.Evicted((0,)), events.Allocated(3, (5, 2, 1, 4, 3, 0))]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda kv: KVCacheManager(0), "num_blocks=0"),
        (lambda kv: KVCacheManager(4, 0), "block_size=0"),
        (lambda kv: KVCacheManager(4, num_host_blocks=-1), "num_host_blocks=-1"),
        (lambda kv: KVCacheManager(4, prefix_cache="tree"), "prefix_cache='tree'"),
        (lambda kv: KVCacheManager(4, eviction="mru"), "eviction='mru'"),
        (lambda kv: KVCacheManager(4, placement="best"), "placement='best'"),
        (lambda kv: kv.begin(0, [1]), "seq_id=0 has blocks in the cache already"),
        (lambda kv: kv.begin(7, []), "token_ids of seq_id=7 is empty"),
        (lambda kv: kv.fork(0, 1), "seq_id=1 has blocks in the cache already"),
        (lambda kv: kv.fork(1, 7), "seq_id=1 is swapped out"),
        (lambda kv: kv.extend(1, 20), "seq_id=1 is swapped out"),
        (lambda kv: kv.commit(1, 7, tokens_of(range(9))), "seq_id=1 is swapped out"),
        (lambda kv: kv.drop(1, [0]), "seq_id=1 is swapped out"),
        (lambda kv: kv.swap_out(1), "seq_id=1 is swapped out"),
        (lambda kv: kv.swap_in(0), "seq_id=0 is not swapped out"),
        (lambda kv: kv.table(7), "seq_id=7 has no blocks in the cache"),
        (lambda kv: kv.blocks_to_extend(7, 1), "seq_id=7 has no blocks in the cache"),
        (lambda kv: kv.commit(0, 7, tokens_of(range(9))), "num_computed=7 is not valid for seq_id=0: 6 tokens are"),
        (lambda kv: kv.commit(0, 5, tokens_of(range(9))), "num_computed=5 is not valid for seq_id=0"),
        (lambda kv: kv.drop(0, [0, 1]), r"logical_blocks=\[1, 0\] is not valid for seq_id=0: its full blocks are 0 to"),
        (lambda kv: kv.drop(0, [-1]), r"logical_blocks=\[-1\]"),
        (lambda kv: kv.free(0, tokens_of(range(9)), 7), "num_computed=7 is more than the 6 slots of seq_id=0"),
    ],
)
def test_misuse_is_named_and_changes_nothing(misuse, message: str) -> None:
    told: list[events.CacheEvent] = []
    kv = KVCacheManager(8, 4, num_host_blocks=4, record=told.append)
    run(kv, 0, range(6))
    run(kv, 1, range(50, 56))
    kv.swap_out(1)
    before, count = (kv.usage(), list(kv.table(0).blocks)), len(told)
    with pytest.raises(InvalidArgumentError, match=message):
        misuse(kv)
    assert (kv.usage(), list(kv.table(0).blocks)) == before
    assert len(told) == count
