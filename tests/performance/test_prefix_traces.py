"""Traces and what caches find in them: the package's manager against a small cache written from the definition."""

from collections import Counter
from itertools import pairwise

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.prefix_traces import busy_day, conversation, most_hits, replay, shared_prompt
from vllm_teach.performance.ranked_cache import RankedCache, count_hits

RANKS = {"lru": lambda use: use.released, "fifo": lambda use: use.inserted, "lfu": lambda use: (use.uses, use.released)}


def common(first, second) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_shared_prompt() -> None:
    trace = shared_prompt(3, 10, 5, 2)
    assert [(len(visit.prompt), len(visit.answer)) for visit in trace] == [(15, 2)] * 3
    assert {common(trace[0].prompt, visit.prompt) for visit in trace[1:]} == {10}


def test_each_turn_begins_with_all_that_was_said() -> None:
    trace = conversation(4, 10, 5, 3)
    for before, after in pairwise(trace):
        said = (*before.prompt, *before.answer)
        assert after.prompt[: len(said)] == said
        assert len(after.prompt) == len(said) + 5


def test_a_day_is_the_same_each_time_and_as_described() -> None:
    day = busy_day(400)
    assert day == busy_day(400) != busy_day(400, seed=1)
    kinds = Counter(visit.kind for visit in day)
    assert len(day) == 400
    for kind, share in (("assistant", 1 / 3), ("popular", 1 / 4), ("chat", 1 / 6), ("document", 1 / 4)):
        assert kinds[kind] / 400 == pytest.approx(share, abs=0.06)
    documents = [visit.prompt for visit in day if visit.kind == "document"]
    assert all(not set(document) & set(other) for document in documents[:5] for other in documents if other != document)


def test_fashions_change_what_is_popular() -> None:
    for fashions in (1, 4):
        day = busy_day(400, fashions=fashions)
        popular = [{visit.prompt for visit in part if visit.kind == "popular"} for part in (day[:100], day[300:])]
        assert bool(popular[0] & popular[1]) == (fashions == 1)


@pytest.mark.parametrize("eviction", RANKS)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(70, 16), (150, 16), (120, 8), (3000, 16)])
def test_the_manager_finds_what_the_small_cache_finds(eviction, num_blocks, block_size) -> None:
    day = busy_day(150, seed=num_blocks)
    cache = RankedCache(num_blocks, block_size, RANKS[eviction])
    for visit in day:
        cache.serve(visit)
    usage = replay(day, num_blocks, block_size, eviction=eviction)
    assert (usage.hit_tokens, usage.evictions) == (cache.hits, cache.evictions)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_nothing_finds_more_than_a_cache_without_limits(block_size) -> None:
    day = busy_day(120)
    ceiling = most_hits(day)
    assert ceiling == sum(
        max((common(visit.prompt[:-1], (*other.prompt, *other.answer[:-1])) for other in day[:number]), default=0)
        for number, visit in enumerate(day)
    )
    assert replay(day, 60_000 // block_size, block_size, prefix_cache="radix").hit_tokens == ceiling
    assert replay(day, 60_000 // block_size, block_size).hit_tokens <= ceiling
    assert replay(day, 60_000 // block_size, block_size, prefix_cache=None).hit_tokens == 0


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks=3 is too few: request 0"):
        replay(shared_prompt(1, 50, 20), 3)
    with pytest.raises(InvalidArgumentError, match="num_blocks=3 is too few"):
        count_hits(shared_prompt(1, 50, 20), 3, 16, RANKS["lru"])
