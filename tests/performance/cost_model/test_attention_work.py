"""Closed forms against the counters of the package's own attention, which its implementations report as they run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach import counters
from vllm_teach.attention.patterns import LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.traffic import naive_traffic, tiled_traffic
from vllm_teach.counters import Tally
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.attention_work import TILE_K, TILE_Q, AttentionLayer, check_algorithm

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 32, 2
SHAPE = {"batch": 1, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "input_bytes": SIZE}


def layer(algorithm: str, window: int | None = None, size: int = SIZE) -> AttentionLayer:
    return AttentionLayer(algorithm, HEADS, KV_HEADS, DIM, size, window)


def tiled(start: int, count: int, window: int | None = None) -> Tally:
    """What the counters say, with accumulators that never leave fast memory."""
    pattern = None if window is None else LocalWindow(window - 1, 0)
    return tiled_traffic(
        **SHAPE, q_len=count, kv_len=start + count, causal=True, pattern=pattern, tile_q=TILE_Q, tile_k=TILE_K,
        fast_memory_bytes=2**30,
    )  # fmt: skip


@given(st.integers(0, 700), st.integers(1, 700))
@settings(max_examples=50, deadline=None)
def test_naive(start: int, count: int) -> None:
    tally = naive_traffic(**SHAPE, q_len=count, kv_len=start + count)
    assert layer("naive").chunk(start, count) == (tally.flops, tally.bytes_moved)
    assert layer("naive", window=5).chunk(start, count) == (
        tally.flops,
        tally.bytes_moved,
    )  # it masks, and skips nothing


@given(st.integers(0, 6), st.integers(1, 6), st.integers(-1, 1), st.none() | st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_tiled(start: int, count: int, slip: int, window: int | None) -> None:
    """At whole tiles, where the sum is an arithmetic series, and beside them."""
    start, count = max(0, start * TILE_Q + slip), max(1, count * TILE_Q + slip)
    tally = tiled(start, count, window)
    assert layer("tiled", window).chunk(start, count) == (tally.flops, tally.bytes_moved)


@given(st.integers(0, 700), st.integers(2, 700), st.none() | st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_paged_reads_keys_once_for_the_heads_that_share_them(start: int, count: int, window: int | None) -> None:
    tally = tiled(start, count, window)
    keys, queries = tally.by_name["tiled.pairs"].bytes_moved, tally.by_name["tiled.queries"].bytes_moved
    assert layer("paged", window).chunk(start, count) == (tally.flops, keys // (HEADS // KV_HEADS) + queries)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8), st.sampled_from(["naive", "tiled", "paged"]))
@settings(max_examples=50, deadline=None)
def test_sequences_with_one_query_add_up(contexts: list[int], algorithm: str) -> None:
    each = [layer(algorithm).chunk(context - 1, 1) for context in contexts]
    found = layer(algorithm).singles(len(contexts), sum(contexts))
    assert found == tuple(map(sum, zip(*each, strict=True)))


def test_what_the_implementations_report_as_they_run() -> None:
    q, k, v = torch.rand(1, 130, HEADS, DIM), torch.rand(1, 200, KV_HEADS, DIM), torch.rand(1, 200, KV_HEADS, DIM)
    with counters.count(fast_memory_bytes=2**30) as tally:
        naive_attention(q, k, v, causal=True)
    assert layer("naive", size=4).chunk(70, 130) == (tally.flops, tally.bytes_moved)
    with counters.count(fast_memory_bytes=2**30) as tally:
        flash_attention(q, k, v, causal=True, tile_q=TILE_Q, tile_k=TILE_K)
    assert layer("tiled", size=4).chunk(70, 130) == (tally.flops, tally.bytes_moved)


def test_an_unknown_algorithm_lists_all() -> None:
    with pytest.raises(InvalidArgumentError, match="attention='flash' is not known: use one of naive, tiled, paged"):
        check_algorithm("flash")
