"""The eviction queue against a sorted list, and what each policy gives up first in both caches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.eviction import EVICTION_POLICIES, EvictionQueue, Usage
from vllm_teach.kvcache.prefix_cache import tokens_of
from vllm_teach.kvcache.prefix_caches import PREFIX_CACHES, make_prefix_cache


def by_policy(policy: str, usage: Usage) -> tuple[int, ...]:
    if policy == "lru":
        return (usage.released,)
    return (usage.inserted,) if policy == "fifo" else (usage.uses, usage.released)


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(["lru", "fifo", "lfu"]),
    steps=st.lists(st.tuples(st.sampled_from(["add", "use", "lock", "unlock", "pop"]), st.integers(0, 9)), max_size=60),
)
def test_the_queue_gives_up_the_lowest_rank(policy: str, steps: list[tuple[str, int]]) -> None:
    queue: EvictionQueue[int] = EvictionQueue(policy)
    entries: dict[int, Usage] = {}
    locked: set[int] = set()
    for verb, entry in steps:
        if verb == "add" and entry not in entries:
            now = queue.now()
            entries[entry] = Usage(now, now)
            queue.offer(entry, entries[entry])
        elif verb == "use" and entry in entries:
            entries[entry].uses += 1
            entries[entry].released = queue.now()
        elif verb == "lock" and entry in entries:
            locked.add(entry)
        elif verb == "unlock" and entry in locked:
            locked.remove(entry)
            queue.offer(entry, entries[entry])
        elif verb == "pop":
            candidates = [entry for entry in entries if entry not in locked]
            expected = min(candidates, key=lambda entry: by_policy(policy, entries[entry]), default=None)
            assert queue.pop(lambda entry: entry in entries and entry not in locked) == expected
            if expected is not None:
                del entries[expected]


def test_an_unknown_policy_is_refused() -> None:
    for name in PREFIX_CACHES:
        with pytest.raises(InvalidArgumentError, match=r"eviction='mru' is not known: choose one of \('lru', 'fifo', "):
            make_prefix_cache(name, BlockPool(4), 2, "mru")


class Server:
    """Runs prompts one after the other, to their ends, over a cache with blocks of two tokens."""

    def __init__(self, name: str, policy: str) -> None:
        self.pool = BlockPool(32)
        cache = make_prefix_cache(name, self.pool, 2, policy)
        assert cache is not None
        self.cache = cache

    def run(self, *tokens: int) -> int:
        """Compute whole blocks of `tokens`; return how many tokens were found."""
        match = self.cache.match(tokens)
        for block in match.blocks:
            self.pool.hold(block)
        cursor = self.cache.start(tokens, match)
        table = [*match.blocks, *self.pool.take(len(tokens) // 2 - len(match.blocks))]
        self.cache.insert(cursor, tokens_of(tokens), table, len(tokens))
        self.cache.end(cursor, tokens_of(tokens), table, len(tokens))
        for block in reversed(table):
            self.pool.release(block)
        return match.num_tokens

    def found(self, *tokens: int) -> int:
        return self.cache.match(tokens).num_tokens


A, B, C = (1, 1), (2, 2), (3, 3)


# A is used three times, the last time before B's second; C is used once, and last.
@pytest.mark.parametrize("name", sorted(PREFIX_CACHES))
@pytest.mark.parametrize(
    ("policy", "order"), [("lru", [A, B, C]), ("fifo", [B, A, C]), ("lfu", [C, B, A])], ids=["lru", "fifo", "lfu"]
)
def test_who_goes_first(name: str, policy: str, order: list[tuple[int, int]]) -> None:
    server = Server(name, policy)
    for tokens in (B, A, A, A, B, C):
        server.run(*tokens)
    for i, victim in enumerate(order):
        assert server.found(*victim) == 2
        assert len(server.cache.evict(1)) == 1
        assert [server.found(*tokens) for tokens in order] == [0] * (i + 1) + [2] * (2 - i)


@pytest.mark.parametrize("name", sorted(PREFIX_CACHES))
@pytest.mark.parametrize("policy", [policy for policy in EVICTION_POLICIES if policy != "none"])
def test_tails_go_before_heads(name: str, policy: str) -> None:
    server = Server(name, policy)
    text = (1, 2, 3, 4, 5, 6, 7, 8)
    server.run(*text)
    for left in (6, 4, 2, 0):
        assert len(server.cache.evict(1)) == 1
        assert server.found(*text) == left


@pytest.mark.parametrize("name", sorted(PREFIX_CACHES))
def test_a_head_used_by_others_outlives_old_tails(name: str) -> None:
    server = Server(name, "lru")
    assert server.run(9, 9, 1, 1) == 0
    assert server.run(9, 9, 2, 2) == 2
    assert len(server.cache.evict(2)) == 2
    assert server.found(9, 9) == 2
    assert server.found(9, 9, 1, 1) == server.found(9, 9, 2, 2) == 2


@pytest.mark.parametrize("name", sorted(PREFIX_CACHES))
def test_none_shares_only_between_sequences_alive_together(name: str) -> None:
    server = Server(name, "none")
    assert server.run(1, 2, 3, 4) == 0
    assert server.pool.num_free == server.pool.num_blocks
    assert server.run(1, 2, 3, 4) == 0

    cursor = server.cache.start((1, 2), server.cache.match((1, 2)))
    table = server.pool.take(1)
    server.cache.insert(cursor, tokens_of((1, 2)), table, 2)
    assert server.run(1, 2, 3, 4) == 2
    assert server.found(1, 2, 3, 4) == 2
    server.cache.end(cursor, tokens_of((1, 2)), table, 2)
    server.pool.release(table[0])
    assert server.found(1, 2, 3, 4) == 0
    assert server.pool.num_free == server.pool.num_blocks
