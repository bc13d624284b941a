import statistics

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import ALPACA, MIXES, SHAREGPT, LengthMix


def test_the_same_seed_draws_the_same_lengths() -> None:
    assert SHAREGPT.draw(50, seed=3) == SHAREGPT.draw(50, seed=3)
    assert SHAREGPT.draw(50, seed=3) != SHAREGPT.draw(50, seed=4)
    # The numbers of the lessons must not change unnoticed.
    assert SHAREGPT.draw(3) == [(81, 212), (197, 186), (402, 44)]


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_means_and_spread_are_those_stated(mix: LengthMix) -> None:
    unclipped = LengthMix(
        mix.name, mix.mean_prompt, mix.mean_output, mix.sigma_prompt, mix.sigma_output, 10**9, 2 * 10**9
    )
    lengths = unclipped.draw(40_000)
    for values, mean in zip(zip(*lengths, strict=True), (mix.mean_prompt, mix.mean_output), strict=True):
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
    # The median of a lognormal variable lies below its mean by exp(sigma^2 / 2).
    outputs = [output for _, output in lengths]
    assert statistics.mean(outputs) / statistics.median(outputs) == pytest.approx(1.65, rel=0.06)


@pytest.mark.parametrize("mix", [SHAREGPT, ALPACA], ids=lambda mix: mix.name)
def test_lengths_stay_within_their_bounds(mix: LengthMix) -> None:
    lengths = mix.draw(20_000, seed=1)
    assert all(1 <= prompt <= 1024 and output >= 1 and prompt + output <= 2048 for prompt, output in lengths)


def test_clipping_is_where_it_is_said_to_be() -> None:
    tight = LengthMix("tight", 100, 100, max_prompt=50, max_total=60).draw(500)
    assert max(prompt for prompt, _ in tight) == 50
    assert max(prompt + output for prompt, output in tight) == 60


def test_no_requests_are_no_mix() -> None:
    with pytest.raises(InvalidArgumentError, match="count=0"):
        ALPACA.draw(0)
