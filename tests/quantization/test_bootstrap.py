"""The bootstrap against closed forms: the normal approximation, and data that leave no doubt."""

import math

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.bootstrap import perplexity_change


def noise(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_is_that_of_the_normal_approximation():
    base, off = noise(20_000) + 3, 0.02 + 0.1 * noise(20_000, seed=1)
    change = perplexity_change(base + off, base, block=50)
    error = float(off.view(-1, 50).mean(1).std()) / math.sqrt(400)
    assert change.ratio == pytest.approx(math.exp(float(off.mean())))
    assert math.log(change.low) == pytest.approx((off.mean() - 1.96 * error).item(), abs=0.1 * error)
    assert math.log(change.high) == pytest.approx((off.mean() + 1.96 * error).item(), abs=0.1 * error)
    assert change.blocks == 400
    assert change.is_sure


def test_what_is_hard_for_both_models_does_not_widen_it():
    hard = 5 * noise(5000)
    change = perplexity_change(hard + 0.01, hard, block=100)
    assert change.low == pytest.approx(math.exp(0.01))
    assert change.high == pytest.approx(math.exp(0.01))


def test_neighbours_that_go_together_widen_it():
    """A hundred equal differences are one fact: drawn one by one they would look like a hundred."""
    off = noise(50).repeat_interleave(20)
    zero = torch.zeros_like(off)
    together, apart = (perplexity_change(off, zero, block=block) for block in (20, 1))
    assert math.log(together.high / together.low) > 4 * math.log(apart.high / apart.low)


def test_no_difference_is_not_sure():
    same = noise(1000)
    assert not perplexity_change(same + 0.1 * noise(1000, seed=5), same, block=20, resamples=500).is_sure
    assert not perplexity_change(same, same).is_sure


def test_a_last_short_block_counts_by_its_tokens():
    nlls = torch.cat([torch.zeros(100), torch.ones(1)])
    change = perplexity_change(nlls, torch.zeros(101), block=100, resamples=2000)
    assert change.ratio == pytest.approx(math.exp(1 / 101))
    # The two blocks drawn are both the long one, or one of each, or both the short one: a mean of 0, 1/101 or 1.
    assert change.low == pytest.approx(1)
    assert change.high == pytest.approx(math.e)


def test_the_same_seed_gives_the_same_interval():
    a, b = noise(3000), noise(3000, seed=1)
    assert perplexity_change(a, b, seed=4) == perplexity_change(a, b, seed=4)
    assert perplexity_change(a, b, seed=4) != perplexity_change(a, b, seed=5)


def test_it_is_read_as_a_percentage():
    hard = noise(1000)
    shown = str(perplexity_change(hard + math.log(1.05), hard, block=10))
    assert shown == "perplexity +5.00 % (95 % interval +5.00 % … +5.00 %)"


def test_a_change_beyond_float64_is_infinite():
    """Once an OverflowError of Python's."""
    change = perplexity_change(torch.full((1000,), 1e4), torch.ones(1000))
    assert (change.ratio, change.low, change.high) == (math.inf, math.inf, math.inf)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block": 0}, "block=0 is not valid"),
        ({"resamples": 1.5}, "resamples=1.5 is not valid"),
        ({"confidence": 95}, "confidence=95 is not valid"),
        ({"block": 10}, "more than 10 of them"),
        ({"reference_nlls": torch.zeros(9)}, r"reference_nlls \[9\]"),
        ({"nlls": torch.full((10,), torch.inf)}, "NaN or infinity"),
    ],
)
def test_what_cannot_work_is_refused(arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        perplexity_change(**{"nlls": torch.zeros(10), "reference_nlls": torch.zeros(10), "block": 2, **arguments})


@pytest.mark.parametrize("arguments", [{"seed": 2**70}, {"seed": 1.5}, {"confidence": "0.9"}])
def test_a_seed_and_a_confidence_of_another_kind_are_refused(arguments):
    with pytest.raises(InvalidArgumentError, match=r"(seed|confidence)=.* is not valid"):
        perplexity_change(torch.ones(600), torch.ones(600), **arguments)
