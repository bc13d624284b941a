"""Each change of logits against a plain float64 loop over one row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.engine import logits as change

ROWS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)


def softmax(row):
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / sum(weights) for weight in weights]


def kept(logits):
    return [index for index, value in enumerate(logits.tolist()) if value > -math.inf]


@settings(deadline=None)
@given(ROWS, st.data())
def test_top_k_keeps_the_k_largest_and_their_equals(row, data):
    k = data.draw(st.integers(1, len(row)))
    cut = sorted(row, reverse=True)[k - 1]
    result = change.keep_top_k(torch.tensor([row]), torch.tensor([k]))[0]
    assert kept(result) == [index for index, value in enumerate(row) if value >= cut]


@settings(deadline=None)
@given(ROWS, st.floats(1e-6, 1.0))
def test_top_p_keeps_the_fewest_that_reach_p(row, p):
    probabilities = softmax(row)
    result = kept(change.keep_top_p(torch.tensor([row]), torch.tensor([p]))[0])
    mass = sum(probabilities[index] for index in result)
    least = min(probabilities[index] for index in result)
    assert mass >= p - 1e-5
    # Without the least likely of them (all its equals count as one) the rest falls short of p.
    assert mass - sum(value for value in probabilities if math.isclose(value, least, rel_tol=1e-5)) < p + 1e-5
    assert all(probabilities[index] <= least * (1 + 1e-5) for index in range(len(row)) if index not in result)


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary_is_what_sorting_all_gives(p):
    """Peaked rows reach p in their first few tokens, flat ones only behind them."""
    spread = torch.tensor([9.0, 4.0, 2.0, 0.3, 0.01])[:, None]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0)) * spread
    logits[4, 700:] = -torch.inf  # as top_k leaves it
    found = change.keep_top_p(logits, torch.full((5,), p))
    for row in range(5):
        values = logits[row].double().softmax(-1).sort(descending=True).values
        wanted = int((values.cumsum(-1) - values < p).sum())
        assert abs(len(kept(found[row])) - wanted) <= max(3, 0.01 * wanted)  # float32 sums
        assert set(kept(found[row])) == set(logits[row].topk(len(kept(found[row]))).indices.tolist())


def test_tiny_top_p_keeps_exactly_the_most_likely():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for p in (1e-9, 1e-38, 1e-60):
        assert kept(change.keep_top_p(logits, torch.tensor([p]))[0]) == [1]


def test_ties_at_the_cut_stay_in_whatever_the_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(change.keep_top_k(logits, torch.tensor([2]))[0]) == [1, 2, 3]
    assert kept(change.keep_top_p(logits, torch.tensor([0.3]))[0]) == [1, 2, 3]


@settings(deadline=None)
@given(ROWS, st.floats(0.001, 1.0))
def test_min_p_is_relative_to_the_most_likely(row, p):
    probabilities = softmax(row)
    result = kept(change.keep_min_p(torch.tensor([row]), torch.tensor([p]))[0])
    for index, value in enumerate(probabilities):
        if not math.isclose(value, p * max(probabilities), rel_tol=1e-4):
            assert (index in result) == (value > p * max(probabilities))


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    prompts = change.count_tokens([[0, 0], []], 4, logits.device)
    outputs = change.count_tokens([[1, 1, 3], []], 4, logits.device)
    assert prompts.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]
    assert outputs.tolist() == [[0, 2, 0, 1], [0, 0, 0, 0]]
    two = torch.tensor([2.0, 2.0])
    result = change.penalize(logits, prompts, outputs, two, torch.tensor([0.3, 0.3]), torch.tensor([0.1, 0.1]))
    # Token 0: in the prompt, so repetition only. 1: negative, so doubled, then 2 x 0.1 and 0.3. 3: once.
    assert result[0].tolist() == pytest.approx([1.0, -4.5, 1.0, -0.15])
    assert torch.equal(result[1], logits[1])


def test_draw_takes_the_largest_sum_of_logit_and_noise():
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [5.0, 1.0, 2.0]])
    noise = torch.tensor([[1.5, 0.0, 30.0], [-4.0, -4.0, 0.0]], dtype=torch.float64)
    assert change.draw(logits, noise).tolist() == [0, 2]


@pytest.mark.parametrize("vocab", [5, 128, 129, 384, 49152])
def test_most_likely_is_the_first_of_the_largest(vocab):
    logits = torch.randint(0, 50, (20, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[3:5] = -torch.inf
    logits[4, -1] = 0.0
    found = change.most_likely(logits).tolist()
    assert found == [row.index(max(row)) for row in logits.tolist()]


def test_finite_rows_finds_every_kind():
    logits = torch.zeros(5, 300)
    logits[1, 299], logits[2, 0], logits[3, 7] = torch.nan, torch.inf, -torch.inf
    logits[4, :2] = torch.tensor([3e38, 3e38])  # their sum would not be finite
    assert change.finite_rows(logits) == [True, False, False, False, True]


@settings(deadline=None)
@given(ROWS, st.integers(-1, 40), st.data())
def test_ranked_tokens(row, wanted, data):
    token = data.draw(st.integers(0, len(row) - 1))
    [entries] = change.rank_tokens(torch.tensor([row]), [token], [wanted])
    probabilities = softmax(row)
    assert entries[token][1] == 1 + sum(value > row[token] for value in row)
    count = len(row) if wanted == -1 else min(wanted, len(row))
    assert count <= len(entries) <= count + 1
    likeliest = sorted(row, reverse=True)[:count]
    others = {place: each for each, (_, place) in entries.items() if each != token}
    assert [row[each] for place, each in sorted(others.items())] == [
        value for place, value in enumerate(likeliest, start=1) if place in others
    ]
    for each, (logprob, _) in entries.items():
        assert logprob == pytest.approx(math.log(probabilities[each]), abs=1e-4)


def test_rows_may_ask_for_different_numbers_of_tokens():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    found = change.rank_tokens(logits, [1, 2, 3], [0, 5, -1])
    assert found == [change.rank_tokens(logits[[i]], [i + 1], [wanted])[0] for i, wanted in enumerate((0, 5, -1))]
    assert [next(iter(entries)) for entries in found] == [1, 2, 3]


def test_gumbel_noise_has_gumbels_distribution():
    """Kolmogorov-Smirnov against exp(-exp(-x)); finite for 10 million numbers, and a function of the seed alone."""
    noise = torch.cat([change.gumbel_noise(seed, 1000) for seed in range(200)]).sort().values
    even = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
    assert ((-(-noise).exp()).exp() - even).abs().max() < 1.95 / math.sqrt(len(noise))  # 0.1 percent
    assert change.gumbel_noise(0, 10_000_000).isfinite().all()
    torch.manual_seed(1)
    assert torch.equal(change.gumbel_noise(2**32 - 1, 9), change.gumbel_noise(2**32 - 1, 9))


def test_draw_never_takes_an_impossible_token():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=generator)
    logits[torch.rand(2000, 50, generator=generator) < 0.6] = -torch.inf
    logits[:, 7] = 0.0
    noise = torch.stack([change.gumbel_noise(seed, 50) for seed in range(2000)])
    chosen = change.draw(logits, noise)
    assert logits.gather(1, chosen[:, None]).isfinite().all()
