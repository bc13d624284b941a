"""The radix tree: matches that end anywhere, split nodes and their pins, locks, and what eviction takes."""

from collections.abc import Sequence

import pytest

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.prefix_cache import PrefixMatch, tokens_of
from vllm_teach.kvcache.radix_prefix_cache import RadixPrefixCache


@pytest.fixture
def cache(pool: BlockPool) -> RadixPrefixCache:
    return RadixPrefixCache(pool, 4)


def begin(cache: RadixPrefixCache, tokens: Sequence[int], salt: str = "") -> tuple[object, list[int]]:
    """Share what is cached, copy the block in which it ends, compute the rest; return the cursor and the table."""
    pool, size = cache.pool, cache.block_size
    match = cache.match(tokens, salt, len(tokens) - 1)
    for block in match.blocks:
        pool.hold(block)
    cursor = cache.start(tokens, match, salt)
    table = list(match.blocks)
    if match.num_tokens % size:
        source = table.pop()
        table += pool.take()
        pool.release(source)
    table += pool.take(-(-len(tokens) // size) - len(table))
    cache.insert(cursor, tokens_of(tokens), table, len(tokens))
    return cursor, table


def finish(cache: RadixPrefixCache, tokens: Sequence[int], cursor: object, table: list[int]) -> None:
    cache.end(cursor, tokens_of(tokens), table, len(tokens))
    for block in reversed(table):
        if block != NO_BLOCK:
            cache.pool.release(block)


def run(cache: RadixPrefixCache, tokens: Sequence[int], salt: str = "") -> list[int]:
    cursor, table = begin(cache, tokens, salt)
    finish(cache, tokens, cursor, table)
    return table


def test_a_match_ends_anywhere(cache: RadixPrefixCache) -> None:
    tokens = list(range(11))
    table = run(cache, tokens)
    for length in range(12):
        blocks = tuple(table[: -(-length // 4)])
        assert cache.match([*tokens[:length], 99, 99]) == PrefixMatch(blocks, length)
        assert cache.match(tokens, limit=length) == PrefixMatch(blocks, length)


def test_while_a_sequence_runs_only_its_full_blocks_are_found(cache: RadixPrefixCache) -> None:
    tokens = list(range(11))
    cursor, table = begin(cache, tokens)
    assert cache.match(tokens) == PrefixMatch(tuple(table[:2]), 8)
    assert cache.pool.pins(table[2]) == 0
    finish(cache, tokens, cursor, table)
    assert cache.match(tokens) == PrefixMatch(tuple(table), 11)


def test_each_branch_leads_to_its_own_copy_of_the_block_where_they_part(cache: RadixPrefixCache) -> None:
    first, second = [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 60, 70]
    one = run(cache, first)
    two = run(cache, second)
    assert two[0] == one[0]
    assert two[1] != one[1]
    assert cache.match(first) == PrefixMatch(tuple(one), 9)
    assert cache.match(second) == PrefixMatch(tuple(two), 8)
    # The common node and the branch that was there before share a block: one pin each.
    assert [cache.pool.pins(block) for block in (*one, two[1])] == [1, 2, 1, 1]


def test_a_longer_copy_of_a_block_replaces_the_shorter(cache: RadixPrefixCache) -> None:
    """A second turn of a conversation copies the first turn's last block and fills it: one of them is enough."""
    one = run(cache, [0, 1, 2, 3, 4, 5])
    two = run(cache, [0, 1, 2, 3, 4, 5, 6, 7])
    assert cache.pool.pins(one[1]) == 0
    assert cache.pool.num_free == 14
    assert cache.match([0, 1, 2, 3, 4, 5]) == PrefixMatch((one[0], two[1]), 6)


def test_when_a_branch_goes_the_common_node_relies_on_another(cache: RadixPrefixCache) -> None:
    one = run(cache, [0, 1, 2, 3, 4, 5, 6, 7])
    two = run(cache, [0, 1, 2, 3, 4, 5, 60, 70])
    assert cache.evict(1) == [one[1]]
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 7]) == PrefixMatch(tuple(two), 6)
    assert cache.evict(9) == [two[1], two[0]]


def test_full_blocks_computed_twice_are_adopted(cache: RadixPrefixCache) -> None:
    tokens = list(range(10))
    _, first = begin(cache, tokens)
    cursor = cache.start(tokens, PrefixMatch())
    second = cache.pool.take(3)
    assert cache.insert(cursor, tokens_of(tokens), second, 7) == {0: first[0]}
    assert cache.insert(cursor, tokens_of(tokens), second, 10) == {1: first[1]}
    assert [cache.pool.pins(block) for block in second] == [0, 0, 0]


def test_a_block_is_adopted_though_it_is_in_two_nodes(cache: RadixPrefixCache) -> None:
    first = run(cache, [0, 1, 2, 3, 4, 5, 6, 7])
    run(cache, [0, 1, 2, 3, 4, 99])
    cursor = cache.start((), PrefixMatch())
    second = cache.pool.take(2)
    assert cache.insert(cursor, tokens_of([0, 1, 2, 3, 4, 5, 6, 7]), second, 8) == {0: first[0], 1: first[1]}


def test_salts_keep_their_texts_apart_and_leave_nothing_behind(cache: RadixPrefixCache) -> None:
    run(cache, [1, 2, 3], "anna")
    assert cache.match([1, 2, 3]) == cache.match([1, 2, 3], "berta") == PrefixMatch()
    run(cache, [1, 2, 3], "berta")
    assert cache.match([1, 2, 3], "anna").blocks != cache.match([1, 2, 3], "berta").blocks
    root = cache.root("berta")
    assert root is not None
    assert [node.tokens for node in root.below()] == [[1, 2, 3]]
    assert len(cache.evict(16)) == 2
    assert cache.root("anna") is cache.root("berta") is cache.root() is None


def test_eviction_spares_what_running_sequences_build_on(cache: RadixPrefixCache) -> None:
    old, shared = [9] * 8, list(range(8))
    run(cache, shared)
    cursor, table = begin(cache, [*shared, 50])
    run(cache, old)
    assert len(cache.evict(16)) == 2
    assert cache.match(shared) == PrefixMatch(tuple(table[:2]), 8)
    finish(cache, [*shared, 50], cursor, table)
    assert len(cache.evict(16)) == 3


def test_one_block_is_taken_from_a_long_leaf_not_all_of_it(cache: RadixPrefixCache) -> None:
    tokens = list(range(40))
    table = run(cache, tokens)
    assert cache.evict(3) == table[:6:-1]
    assert cache.match(tokens) == PrefixMatch(tuple(table[:7]), 28)


def test_as_a_last_resort_a_head_goes_with_all_that_builds_on_it(cache: RadixPrefixCache) -> None:
    """A sequence gave back its head and runs on: the head is idle, and must be free for others if they need it."""
    tokens = list(range(16))
    cursor, table = begin(cache, tokens[:12])
    cache.pool.release(table[0])
    head, table[0] = table[0], NO_BLOCK
    assert cache.pool.num_idle == 1
    assert cache.evict(1) == [head]
    assert cache.match(tokens) == PrefixMatch()
    assert [cache.pool.pins(block) for block in table[1:]] == [0, 0]
    # The sequence has no prefix to build on any more, and indexes nothing.
    table += cache.pool.take(1)
    assert cache.insert(cursor, tokens_of(tokens), table, 16) == {}
    assert len(cache) == 0
    finish(cache, tokens, cursor, table)
    assert cache.pool.num_free == 16


def test_forks_go_their_own_ways(cache: RadixPrefixCache) -> None:
    prompt = list(range(8))
    cursor, table = begin(cache, prompt)
    fork = cache.copy_cursor(cursor)
    for block in table:
        cache.pool.hold(block)
    left, right = [*prompt, 20, 21, 22, 23], [*prompt, 30, 31, 32, 33]
    left_table, right_table = [*table, *cache.pool.take(1)], [*table, *cache.pool.take(1)]
    cache.insert(cursor, tokens_of(left), left_table, 12)
    cache.insert(fork, tokens_of(right), right_table, 12)
    assert cache.match(left) == PrefixMatch(tuple(left_table), 12)
    assert cache.match(right) == PrefixMatch(tuple(right_table), 12)
    finish(cache, left, cursor, left_table)
    assert cache.evict(16) == [left_table[2]]
    finish(cache, right, fork, right_table)


def test_after_a_reset_running_sequences_index_nothing(cache: RadixPrefixCache) -> None:
    tokens = list(range(8))
    cursor, table = begin(cache, tokens)
    fork = cache.copy_cursor(cursor)
    cache.reset()
    late = cache.copy_cursor(cursor)
    more = [*tokens, 8, 9, 10, 11]
    table += cache.pool.take(1)
    for each in (cursor, fork, late):
        assert cache.insert(each, tokens_of(more), table, 12) == {}
        cache.end(each, tokens_of(more), table, 12)
    assert cache.match(more) == PrefixMatch()
    run(cache, tokens)
    assert cache.match(tokens).num_tokens == 8


def test_a_moved_block_is_found_in_its_new_place(cache: RadixPrefixCache) -> None:
    tokens = list(range(8))
    _, (a, b) = begin(cache, tokens)
    swap = {a: b, b: a}
    cache.pool.move(swap)
    cache.move({**swap, 15: 14})
    assert cache.match(tokens) == PrefixMatch((b, a), 8)


def test_a_locked_leaf_outlives_one_that_was_used_later(cache: RadixPrefixCache) -> None:
    """The lock is there though the sequence holds a copy of its own: it copied the block to write behind the match."""
    first = run(cache, [1, 2])
    cursor, table = begin(cache, [1, 2, 3])
    assert cache.pool.holders(first[0]) == 0
    later = run(cache, [7, 8])
    assert cache.evict(1) == later
    assert cache.match([1, 2]) == PrefixMatch(tuple(first), 2)
    assert cache.evict(1) == first
    finish(cache, [1, 2, 3], cursor, table)
    assert cache.match([1, 2, 3]) == PrefixMatch(tuple(table), 3)


def test_a_branch_that_runs_on_keeps_its_half_of_a_split_block() -> None:
    """When the other branch ends, and nothing is kept for it, the tokens before the split are found in this one."""
    cache = RadixPrefixCache(BlockPool(16), 4, "none")
    one, two = [0, 1, 2, 3], [0, 1, 20, 30]
    first, first_table = begin(cache, one)
    second, second_table = begin(cache, two)
    assert cache.match([0, 1]).num_tokens == 2
    finish(cache, one, first, first_table)
    assert cache.match(one) == PrefixMatch(tuple(second_table), 2)
    finish(cache, two, second, second_table)
    assert cache.pool.num_free == 16


def test_blocks_that_were_given_back_are_neither_adopted_nor_indexed(cache: RadixPrefixCache) -> None:
    tokens = list(range(12))
    first = run(cache, tokens[:8])
    cursor = cache.start(tokens, PrefixMatch())
    table = [NO_BLOCK, *cache.pool.take(2)]
    assert cache.insert(cursor, tokens_of(tokens), table, 8) == {1: first[1]}
    fresh = cache.start([5, 5], PrefixMatch())
    assert cache.insert(fresh, tokens_of([5] * 8), [NO_BLOCK, *cache.pool.take(1)], 8) == {}
    assert cache.match([5, 5]) == PrefixMatch()


def test_no_node_above_keeps_the_block_of_a_branch_that_went(cache: RadixPrefixCache) -> None:
    """Three texts part at two places of one block: both common nodes recorded the first one's block."""
    one, two, three = run(cache, [1, 2, 3, 4]), run(cache, [1, 9, 9, 9]), run(cache, [1, 2, 8, 8])
    assert cache.pool.pins(one[0]) == 3
    run(cache, [1, 9, 9, 9])  # so that `one` is the least recently used
    assert cache.evict(1) == one
    assert cache.match([1, 2, 3, 4]) == PrefixMatch(tuple(three), 2)
    assert cache.evict(2) == [*three, *two]
