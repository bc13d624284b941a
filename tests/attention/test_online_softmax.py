import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.online_softmax import SoftmaxState, finish, merge, update

ROWS, DIM = (2, 3), 4
CLOSE = {"rtol": 0, "atol": 1e-12}


def draw(keys: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [2, 3, keys], about a fifth of them -inf, and values [2, keys, 4]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(*ROWS, keys, dtype=torch.float64, generator=generator) * scale
    hidden = torch.rand(*ROWS, keys, generator=generator) < 0.2
    values = torch.randn(ROWS[0], keys, DIM, dtype=torch.float64, generator=generator)
    return scores.masked_fill(hidden, -math.inf), values


def empty() -> SoftmaxState:
    return SoftmaxState.empty(ROWS, DIM, dtype=torch.float64)


def state_of(keys: int, seed: int, scale: float = 3.0) -> SoftmaxState:
    return update(empty(), *draw(keys, seed, scale))


def assert_same(a: SoftmaxState, b: SoftmaxState) -> None:
    for x, y in ((a.m, b.m), (a.l, b.l), (a.acc, b.acc)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def softmax_at_once(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row of only -inf is 0/0
    return probs @ values, torch.logsumexp(scores, dim=-1)


@settings(max_examples=80, deadline=None)
@given(tiles=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 10_000))
def test_any_partition_into_tiles_gives_the_softmax(tiles, seed):
    scores, values = draw(sum(tiles), seed)
    state, start = empty(), 0
    for tile in tiles:
        state = update(state, scores[..., start : start + tile], values[:, start : start + tile])
        start += tile
    out, lse = finish(state)
    expected_out, expected_lse = softmax_at_once(scores, values)
    torch.testing.assert_close(out, expected_out, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)


@settings(max_examples=80, deadline=None)
@given(keys=st.tuples(*[st.integers(0, 6)] * 3), seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 300.0]))
def test_merge_is_associative_and_commutative_and_equals_updating(keys, seed, scale):
    a, b, c = (state_of(n, seed + i, scale) for i, n in enumerate(keys))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    tiles = [draw(n, seed + i, scale) for i, n in enumerate(keys)]
    assert_same(merge(a, b), update(a, *tiles[1]))


@settings(max_examples=40, deadline=None)
@given(keys=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_the_empty_state_is_neutral(keys, seed):
    state = state_of(keys, seed)
    assert_same(merge(state, empty()), state)
    assert_same(merge(empty(), state), state)


@settings(max_examples=40, deadline=None)
@given(keys=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_the_invariant_of_a_row(keys, seed):
    state = state_of(keys, seed)
    unseen = state.m == -math.inf
    assert (state.l[unseen] == 0).all()
    assert (state.acc[unseen] == 0).all()
    assert (state.l[~unseen] >= 1).all()


def test_two_empty_states_merge_to_zero_and_minus_infinity():
    out, lse = finish(merge(empty(), empty()))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_a_fully_masked_tile_changes_nothing():
    state = state_of(5, seed=1)
    scores, values = draw(4, seed=2)
    assert_same(update(state, torch.full_like(scores, -math.inf), values), state)
    out, lse = finish(update(empty(), torch.full_like(scores, -math.inf), values))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_by_hand():
    """Scores 1, 3 | 2 and values 10, 20 | 30: what the lesson computes with a pencil."""
    state = SoftmaxState.empty([1], 1, dtype=torch.float64)
    state = update(state, torch.tensor([[1.0, 3.0]]), torch.tensor([[10.0], [20.0]]))
    assert state.m.item() == 3
    assert state.l.item() == pytest.approx(math.exp(-2) + 1)
    assert state.acc.item() == pytest.approx(10 * math.exp(-2) + 20)
    state = update(state, torch.tensor([[2.0]]), torch.tensor([[30.0]]))
    assert state.m.item() == 3
    assert state.l.item() == pytest.approx(math.exp(-2) + 1 + math.exp(-1))
    out, lse = finish(state)
    weights = [math.exp(1), math.exp(3), math.exp(2)]
    assert out.item() == pytest.approx((10 * weights[0] + 20 * weights[1] + 30 * weights[2]) / sum(weights))
    assert lse.item() == pytest.approx(math.log(sum(weights)))


def test_arguments_are_not_changed():
    state, (scores, values) = state_of(4, seed=3), draw(4, seed=4)
    before = [t.clone() for t in (state.m, state.l, state.acc, scores, values)]
    merge(update(state, scores, values), state)
    assert all(torch.equal(x, y) for x, y in zip(before, (state.m, state.l, state.acc, scores, values), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_keep_the_states_dtype(dtype):
    scores, values = (t.to(dtype) for t in draw(300, seed=5))
    state = update(SoftmaxState.empty(ROWS, DIM), scores, values)
    assert {state.m.dtype, state.l.dtype, state.acc.dtype} == {torch.float32}
    expected, _ = softmax_at_once(scores.double(), values.double())
    torch.testing.assert_close(finish(state)[0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e30, -1e30])
def test_large_scores_neither_overflow_nor_vanish(offset):
    scores = torch.tensor([[0.0, 0.0, 0.0, -math.inf]], dtype=torch.float64) + offset
    values = torch.tensor([[3.0], [6.0], [9.0], [100.0]], dtype=torch.float64)
    state = SoftmaxState.empty([1], 1, dtype=torch.float64)
    for j in range(4):
        state = update(state, scores[:, j : j + 1], values[j : j + 1])
    out, lse = finish(state)
    assert out.item() == pytest.approx(6.0)
    assert lse.item() == pytest.approx(offset + math.log(3))


def test_what_dropout_drops_stays_in_the_sum_and_leaves_the_accumulator(make_qkv):
    scores, values = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 12, 3, dtype=torch.float64)
    keep = torch.rand(2, 5, 12) < 0.7
    state = SoftmaxState.empty((2, 5), 3, dtype=torch.float64)
    for tile in (slice(0, 5), slice(5, 6), slice(6, 12)):
        state = update(state, scores[..., tile], values[:, tile], keep[..., tile])
    out, lse = finish(state)
    probs = torch.softmax(scores, dim=-1)
    torch.testing.assert_close(out, (probs * keep) @ values, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=-1), rtol=0, atol=1e-12)
