import math

import pytest
import torch

from vllm_teach.engine.sampler import sample
from vllm_teach.errors import EngineError

DRAWS = 20_000


def chi_square(counts, probabilities):
    """Return the statistic and how many standard deviations it lies above its mean."""
    total = sum(counts)
    terms = [(c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    freedom = len(terms) - 1
    return (sum(terms) - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


def expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by its definition, in float64, one token at a time."""
    p = (logits.double() / temperature).softmax(-1)
    p[p < min_p * p.max()] = 0
    order = p.argsort(descending=True).tolist()
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    mass, keep = 0.0, []
    for token in order:
        if mass < top_p:
            keep.append(token)
        mass += p[token].item()
    p[[token for token in order if token not in keep]] = 0
    return (p / p.sum()).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_distribution(make_sequence, params):
    """20,000 draws, one from each of as many seeds, by the chi-square test; they are fixed, so the outcome is too."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    counts = [0] * 12
    for first in range(0, DRAWS, 500):
        rows = [make_sequence(source=f"distribution {first + row}", **params) for row in range(500)]
        for token in sample(logits.expand(500, 12), rows).tokens.values():
            counts[token.token_id] += 1
    probabilities = expected(logits, **params)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
    assert chi_square(counts, probabilities) < 4
    # The test would notice a wrong temperature.
    assert chi_square(counts, expected(logits, **{**params, "temperature": params.get("temperature", 1) * 1.5})) > 10


def test_random_numbers_are_even_and_independent_along_a_sequence(make_sequence):
    """The numbers of one sequence, position after position: even by chi-square, and no neighbour tells the next."""
    sequence, numbers = make_sequence(source="seed 5 0"), []
    for _ in range(4000):
        numbers.append(sequence.random_seed() / 2**32)
        sequence.output_token_ids.append(0)
    assert all(0 <= number < 1 for number in numbers)
    counts = [0] * 20
    for number in numbers:
        counts[int(number * 20)] += 1
    assert abs(chi_square(counts, [1 / 20] * 20)) < 4
    pairs = torch.tensor([numbers[:-1], numbers[1:]], dtype=torch.float64)
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 4 / math.sqrt(4000)


def test_sampling_again_gives_the_same_tokens(make_sequence):
    """A step that was interrupted runs again: nothing about a sequence may depend on how often it was sampled."""
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(source=row, output=(1,) * (row % 3)) for row in range(40)]
    first = sample(logits, rows).tokens
    assert sample(logits, rows).tokens == first
    assert len({token.token_id for token in first.values()}) > 10


def test_greedy_takes_the_most_likely(make_sequence):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(temperature=0, top_p=0.5) for _ in range(5)]
    result = sample(logits, rows)
    assert [result.tokens[row.seq_id].token_id for row in rows] == logits.argmax(-1).tolist()


def test_neighbours_never_change_a_row(make_sequence):
    generator = torch.Generator().manual_seed(3)
    settings = [
        {"temperature": 0},
        {},
        {"top_p": 0.3},
        {"top_k": 2},
        {"min_p": 0.4, "temperature": 3.0},
        {"repetition_penalty": 1.7, "frequency_penalty": 1.0},
        {"logprobs": 3},
        {"logit_bias": {3: 5.0, 40: -100}, "logprobs": -1},
        {"temperature": 0, "logit_bias": {7: 2.5}, "presence_penalty": 1.0},
        {"min_tokens": 9, "temperature": 0.3},
    ]
    logits = torch.randn(len(settings), 60, generator=generator) * 3

    def tokens(rows):
        sequences = [
            make_sequence(prompt=(5, 6), output=(7, 7), stop_ids=(3,), source=row, **settings[row]) for row in rows
        ]
        result = sample(logits[rows], sequences)
        return {row: result.tokens[each.seq_id] for row, each in zip(rows, sequences, strict=True)}

    together = tokens(list(range(len(settings))))
    for row in range(len(settings)):
        assert tokens([row])[row] == together[row]
    assert tokens([6, 3, 1]) == {row: together[row] for row in (6, 3, 1)}


def test_min_tokens_forbids_the_end_until_then(make_sequence):
    logits = torch.zeros(2, 10)
    logits[:, 4] = 50.0
    early = make_sequence(temperature=0, min_tokens=2, output=(1,), stop_ids=(4,))
    late = make_sequence(temperature=0, min_tokens=2, output=(1, 1), stop_ids=(4,))
    result = sample(logits, [early, late])
    assert result.tokens[early.seq_id].token_id != 4
    assert result.tokens[late.seq_id].token_id == 4


def test_a_bias_is_added_before_the_penalties_and_the_temperature(make_sequence):
    logits = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    raised = make_sequence(temperature=0, logit_bias={0: 1.5})
    # 2.5 of token 0 is divided by 2: 1.25, so that 2.0 of token 1 stays ahead.
    tempered = make_sequence(prompt=(0,), temperature=0, logit_bias={0: 1.5}, repetition_penalty=2.0)
    result = sample(logits, [raised, tempered])
    assert [result.tokens[each.seq_id].token_id for each in (raised, tempered)] == [0, 1]
    assert logits.tolist() == [[1.0, 2.0, 0.0]] * 2  # the rows are the caller's


def test_a_bias_of_100_decides_and_shifts_the_odds_as_exp(make_sequence):
    logits = torch.zeros(600, 4)
    rows = [make_sequence(source=row, logit_bias={2: 100}) for row in range(300)]
    rows += [make_sequence(source=row, logit_bias={1: math.log(3), 0: -100, 3: -100}) for row in range(300)]
    tokens = [token.token_id for token in sample(logits, rows).tokens.values()]
    assert set(tokens[:300]) == {2}
    assert set(tokens[300:]) == {1, 2}
    assert abs(chi_square([tokens[300:].count(1), tokens[300:].count(2)], [0.75, 0.25])) < 4


def test_a_bias_cannot_bring_back_an_end_that_comes_too_early(make_sequence):
    sequence = make_sequence(temperature=0, min_tokens=1, stop_ids=(2,), logit_bias={2: 100})
    assert sample(torch.zeros(1, 4), [sequence]).tokens[sequence.seq_id].token_id != 2


def test_forks_have_equal_rows_and_draw_for_themselves(make_sequence):
    logits = torch.zeros(1, 1000).expand(5, 1000)
    result = sample(logits, [make_sequence(source=f"seed 1 {index}") for index in range(5)])
    assert len({token.token_id for token in result.tokens.values()}) == 5


def test_greedy_rows_beside_drawn_ones(make_sequence):
    logits = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(temperature=row % 2, source=row, top_p=0.5) for row in range(6)]
    result = sample(logits, rows)
    for row, each in enumerate(rows):
        if row % 2:
            assert result.tokens[each.seq_id] == sample(logits[[row]], [each]).tokens[each.seq_id]
        else:
            assert result.tokens[each.seq_id].token_id == logits[row].argmax()


def test_logprobs_are_the_models_own_whatever_the_filters(make_sequence):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)) * 2
    sequence = make_sequence(logprobs=3, temperature=5.0, top_k=20, repetition_penalty=1.5)
    token = sample(logits, [sequence]).tokens[sequence.seq_id]
    raw = logits[0].double().log_softmax(-1)
    order = raw.argsort(descending=True).tolist()
    assert set(token.top_logprobs) == {*order[:3], token.token_id}
    for token_id, (logprob, rank) in token.top_logprobs.items():
        assert logprob == pytest.approx(raw[token_id].item(), abs=1e-5)
        assert order[rank - 1] == token_id
    assert token.logprob == token.top_logprobs[token.token_id][0]


def test_logprobs_zero_is_the_chosen_token_alone_and_minus_one_all(make_sequence):
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    none, every = make_sequence(logprobs=0), make_sequence(logprobs=-1)
    result = sample(logits, [none, every])
    assert list(result.tokens[none.seq_id].top_logprobs) == [result.tokens[none.seq_id].token_id]
    assert len(result.tokens[every.seq_id].top_logprobs) == 30


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_alone(make_sequence, broken):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = broken
    rows = [make_sequence(source=row) for row in range(3)]
    result = sample(logits, rows)
    assert set(result.errors) == {rows[1].seq_id}
    assert isinstance(result.errors[rows[1].seq_id], EngineError)
    for row in (0, 2):
        alone = make_sequence(source=row)
        assert sample(logits[[row]], [alone]).tokens[alone.seq_id] == result.tokens[rows[row].seq_id]


def test_an_exception_is_traced_to_its_row(make_sequence):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(source=row) for row in range(3)]
    rows[2].params.temperature = "hot"  # as if a check had been forgotten
    rows[2].params.__class__ = type("Broken", (type(rows[2].params),), {"greedy": False})
    result = sample(logits, rows)
    assert set(result.errors) == {rows[2].seq_id}
    assert set(result.tokens) == {rows[0].seq_id, rows[1].seq_id}
    alone = make_sequence(source=0)
    assert sample(logits[[0]], [alone]).tokens[alone.seq_id] == result.tokens[rows[0].seq_id]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_token_left_is_an_error_not_a_forbidden_token(make_sequence, temperature):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(temperature=temperature, source=row) for row in range(3)]
    rows[1].params.min_tokens, rows[1].stop_ids = 5, frozenset(range(20))
    result = sample(logits, rows)
    assert set(result.tokens) == {rows[0].seq_id, rows[2].seq_id}
    # The message itself, not one error that quotes another.
    assert str(result.errors[rows[1].seq_id]).startswith("the request's parameters leave no token")


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_penalty_beyond_float32_is_an_error(make_sequence, temperature):
    sequence = make_sequence(temperature=temperature)
    sequence.params.repetition_penalty = 1e-46  # which a request cannot ask for
    assert "leave no token" in str(sample(torch.ones(1, 20), [sequence]).errors[sequence.seq_id])


def test_extreme_temperatures_stay_finite(make_sequence):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)) * 30
    cold, hot = make_sequence(temperature=1.1e-5), make_sequence(temperature=1e30)
    result = sample(logits, [cold, hot])
    assert result.tokens[cold.seq_id].token_id == logits[0].argmax()
    assert not result.errors


def test_a_temperature_between_1e_5_and_a_hundredth_is_used_as_it_is(make_sequence):
    """Two logits 1e-4 apart: at a temperature of 1e-4 the odds are e to 1, at 0.01, vLLM's least, about 1 to 1."""
    logits = torch.tensor([0.0, 1e-4]).expand(2000, 2)
    rows = [make_sequence(source=row, temperature=1e-4) for row in range(2000)]
    tokens = [token.token_id for token in sample(logits, rows).tokens.values()]
    counts = [tokens.count(0), tokens.count(1)]
    assert abs(chi_square(counts, [1 / (1 + math.e), math.e / (1 + math.e)])) < 4
    assert chi_square(counts, [0.4975, 0.5025]) > 50
