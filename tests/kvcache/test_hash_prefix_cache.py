"""The hash chain: keys that cannot be confused, one block a key, nothing stale."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.hash_prefix_cache import HashPrefixCache, hash_block, hash_salt
from vllm_teach.kvcache.prefix_cache import PrefixMatch, tokens_of


@pytest.fixture
def cache(pool: BlockPool) -> HashPrefixCache:
    return HashPrefixCache(pool, 4)


def compute(cache: HashPrefixCache, tokens: Sequence[int], salt: str = "") -> tuple[object, list[int]]:
    """Compute `tokens` without sharing; return the cursor and the table, which is held."""
    cursor = cache.start(tokens, PrefixMatch(), salt)
    table = cache.pool.take(-(-len(tokens) // cache.block_size))
    cache.insert(cursor, tokens_of(tokens), table, len(tokens))
    return cursor, table


def test_only_whole_blocks_are_found(cache: HashPrefixCache) -> None:
    tokens = list(range(11))
    _, table = compute(cache, tokens)
    assert cache.match(tokens) == PrefixMatch(tuple(table[:2]), 8)
    assert cache.match([*tokens[:7], 99]) == PrefixMatch((table[0],), 4)
    assert cache.match([99, *tokens[1:]]) == PrefixMatch()
    assert cache.pool.pins(table[2]) == 0


def test_a_prompt_that_is_cached_whole_keeps_its_last_token_to_compute(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    _, table = compute(cache, tokens)
    assert cache.match(tokens, limit=len(tokens) - 1) == PrefixMatch((table[0],), 4)
    assert cache.match(tokens, limit=3) == PrefixMatch()


def test_what_is_not_yet_computed_is_no_hit(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    cursor = cache.start(tokens, PrefixMatch())
    table = cache.pool.take(2)
    assert cache.match(tokens).num_tokens == 0
    cache.insert(cursor, tokens_of(tokens), table, 7)
    assert cache.match(tokens).num_tokens == 4


def test_a_block_computed_twice_is_adopted(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    _, first = compute(cache, tokens)
    cursor = cache.start(tokens, PrefixMatch())
    second = cache.pool.take(2)
    assert cache.insert(cursor, tokens_of(tokens), second, 4) == {0: first[0]}
    assert cache.insert(cursor, tokens_of(tokens), [first[0], second[1]], 8) == {1: first[1]}
    assert [cache.pool.pins(block) for block in (*first, *second)] == [1, 1, 0, 0]


def test_salts_keep_their_texts_apart(cache: HashPrefixCache) -> None:
    tokens = list(range(4))
    _, first = compute(cache, tokens, "anna")
    assert cache.match(tokens) == cache.match(tokens, "berta") == PrefixMatch()
    _, second = compute(cache, tokens, "berta")
    assert cache.match(tokens, "anna").blocks == tuple(first)
    assert cache.match(tokens, "berta").blocks == tuple(second)


def test_a_block_is_found_only_behind_its_own_head(cache: HashPrefixCache) -> None:
    """The same tokens at the same place after another beginning have other keys and values."""
    compute(cache, [1, 1, 1, 1, 5, 6, 7, 8])
    compute(cache, [2, 2, 2, 2])
    assert cache.match([2, 2, 2, 2, 5, 6, 7, 8]).num_tokens == 4
    assert cache.match([5, 6, 7, 8]).num_tokens == 0


tokens_of_a_block = st.lists(st.integers(0, 2**31), max_size=6)


@settings(max_examples=300, deadline=None)
@given(tokens_of_a_block, tokens_of_a_block, st.text(max_size=3), st.text(max_size=3))
def test_keys_are_equal_only_for_equal_texts(a: list[int], b: list[int], salt: str, other: str) -> None:
    assert (hash_block(hash_salt(salt), a) == hash_block(hash_salt(other), b)) == ((salt, a) == (other, b))


def test_no_split_into_tokens_or_blocks_looks_like_another() -> None:
    root = hash_salt("")
    texts: list[list[int]] = [[1, 23], [12, 3], [123], [1, 2, 3], [23, 1], [1 << 8, 0], [1, 0], [0, 1], [0], [0, 0], []]
    keys = {hash_block(root, text) for text in texts}
    keys |= {hash_block(hash_block(root, [1]), [2, 3]), hash_block(hash_block(root, [1, 2]), [3])}
    keys |= {hash_salt(""), hash_salt("1")}
    assert len(keys) == len(texts) + 4


def test_eviction_leaves_no_stale_key(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    cursor, table = compute(cache, tokens)
    cache.end(cursor, tokens_of(tokens), table, 8)
    for block in reversed(table):
        cache.pool.release(block)
    assert cache.evict(1) == [table[1]]
    assert cache.match(tokens) == PrefixMatch((table[0],), 4)
    assert cache.evict(5) == [table[0]]
    assert cache.match(tokens) == PrefixMatch()
    assert len(cache) == 0
    assert cache.pool.num_free == cache.pool.num_blocks


def test_what_is_forgotten_is_found_no_more_though_it_is_held(cache: HashPrefixCache) -> None:
    tokens = list(range(12))
    _, table = compute(cache, tokens)
    assert cache.forget(table[1]) == []
    assert (len(cache), cache.pool.pins(table[1]), cache.pool.holders(table[1])) == (2, 0, 1)
    assert cache.match(tokens) == PrefixMatch((table[0],), 4)
    cache.pool.release(table[0])
    assert cache.forget(table[0]) == [table[0]]


def test_what_is_held_is_never_evicted(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    _, table = compute(cache, tokens)
    assert cache.evict(2) == []
    cache.pool.release(table[1])
    assert cache.pool.num_available == 15
    assert cache.evict(2) == [table[1]]


def test_the_head_that_a_sequence_gave_back_can_be_evicted(cache: HashPrefixCache) -> None:
    """Its tail is held, so only the head is idle; computed anew, the head makes the tail findable again."""
    tokens = list(range(12))
    cursor, table = compute(cache, tokens)
    cache.pool.release(table[0])
    assert cache.evict(1) == [table[0]]
    assert cache.match(tokens) == PrefixMatch()
    _, again = compute(cache, tokens[:4])
    assert cache.match(tokens) == PrefixMatch((again[0], *table[1:]), 12)
    cache.end(cursor, tokens_of(tokens), [NO_BLOCK, *table[1:]], 12)


def test_a_new_cursor_skips_blocks_that_were_given_back(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    cursor = cache.start(tokens, PrefixMatch())
    table = [NO_BLOCK, *cache.pool.take(1)]
    assert cache.insert(cursor, tokens_of(tokens), table, 8) == {}
    assert cache.match(tokens) == PrefixMatch()
    assert len(cache) == cache.pool.pins(table[1]) == 1


def test_after_a_reset_running_sequences_index_nothing(cache: HashPrefixCache) -> None:
    tokens = list(range(12))
    cursor, table = compute(cache, tokens[:8])
    fork = cache.copy_cursor(cursor)
    cache.reset()
    table += cache.pool.take(1)
    for each in (cursor, fork):
        assert cache.insert(each, tokens_of(tokens), table, 12) == {}
    assert cache.match(tokens) == PrefixMatch()
    assert all(cache.pool.pins(block) == 0 for block in table)


def test_a_moved_block_is_found_in_its_new_place(cache: HashPrefixCache) -> None:
    tokens = list(range(8))
    _, (a, b) = compute(cache, tokens)
    swap = {a: b, b: a}
    cache.pool.move(swap)
    cache.move({**swap, 15: 14})
    assert cache.match(tokens) == PrefixMatch((b, a), 8)
