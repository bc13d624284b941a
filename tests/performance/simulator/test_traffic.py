"""Requests of a simulation: their lengths, their times, their prefixes."""

import math
from statistics import mean, pstdev

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import ALPACA, SHAREGPT
from vllm_teach.performance.load_test.arrivals import OpenLoop
from vllm_teach.performance.simulator.traffic import AT_ONCE, Traffic, draw_times, draw_traffic
from vllm_teach.performance.virtual_time import Arrival, make_sequence


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def test_fixed_lengths_come_all_at_once() -> None:
    traffic = draw_traffic(3, (20, 5))
    assert traffic.arrivals == (Arrival(20, 5),) * 3
    assert (traffic.num_prompt_tokens, traffic.num_output_tokens, traffic.longest) == (60, 15, 25)
    assert str(traffic) == "3 requests, each 20 tokens in and 5 out, all at once"


@pytest.mark.parametrize("mix", [SHAREGPT, ALPACA])
def test_a_mix_is_drawn_as_everywhere_else(mix) -> None:
    traffic = draw_traffic(50, mix, seed=3)
    assert [(each.prompt_len, each.output_len) for each in traffic.arrivals] == mix.draw(50, 3)
    assert f"the mix {mix.name!r}" in str(traffic)


def test_poisson_times_are_those_of_the_load_test() -> None:
    planned = OpenLoop(rate=7.0).offsets(seed=5)
    assert draw_times(200, 7.0, seed=5) == pytest.approx([next(planned) for _ in range(200)], rel=1e-12)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    between = gaps(draw_times(40_000, 8.0, burstiness))
    assert mean(between) == pytest.approx(1 / 8, rel=0.03)
    assert pstdev(between) / mean(between) == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)
    assert min(between) >= 0


def test_another_rate_stretches_the_same_gaps() -> None:
    slow, fast = draw_times(50, 1.0, 0.5, seed=2), draw_times(50, 4.0, 0.5, seed=2)
    assert slow == pytest.approx([4 * each for each in fast])
    traffic = draw_traffic(50, SHAREGPT, 1.0, burstiness=0.5, seed=2)
    again = traffic.at_rate(4.0, 0.5, seed=2)
    assert [each.time for each in again.arrivals] == fast
    assert [each.output_len for each in again.arrivals] == [each.output_len for each in traffic.arrivals]
    assert "4 a second (gamma gaps of burstiness 0.5)" in str(again)
    assert {each.time for each in traffic.at_rate(AT_ONCE).arrivals} == {0.0}


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    traffic = draw_traffic(12, (10, 2)).with_shared_prefix(6, 2, seed=1)
    prompts = [make_sequence(i, each).prompt_token_ids for i, each in enumerate(traffic.arrivals)]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({prompt[:6] for prompt in prompts}) == 2
    assert len({prompt[6] for prompt in prompts}) == 12
    assert "one of 2 texts of 6 tokens" in str(traffic)


def test_a_prompt_keeps_a_token_of_its_own() -> None:
    traffic = draw_traffic(2, (4, 2)).with_shared_prefix(100)
    assert {each.prefix_len for each in traffic.arrivals} == {3}
    first, second = (make_sequence(i, each).prompt_token_ids for i, each in enumerate(traffic.arrivals))
    assert first[:3] == second[:3]
    assert first != second


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: draw_traffic(0, (1, 1)), "num_requests=0"),
        (lambda: draw_traffic(1, (0, 1)), "prompt_len=0"),
        (lambda: draw_traffic(1, (1, -2)), "output_len=-2"),
        (lambda: draw_traffic(1, (1, 1), 0.0), r"rate=0\.0"),
        (lambda: draw_traffic(1, (1, 1), math.nan), "rate=nan"),
        (lambda: draw_traffic(1, (1, 1), -math.inf), "rate=-inf"),
        (lambda: draw_traffic(1, (1, 1), 1e-300), "rate=1e-300 is too low"),  # its steps would seem to take no time
        (lambda: draw_traffic(1, (1, 1), 5e-324), "rate=4.94066e-324 is too low"),
        (lambda: draw_traffic(1, (1, 1), burstiness=0), "burstiness=0"),
        (lambda: draw_traffic(1, (1, 1), seed=0.5), r"seed=0\.5"),
        (lambda: draw_traffic(1, (1, 1)).with_shared_prefix(-1), "num_tokens=-1"),
        (lambda: draw_traffic(1, (1, 1)).with_shared_prefix(1, 0), "num_prefixes=0"),
        (lambda: Traffic((), "", ""), "arrivals is empty"),
        (lambda: Arrival(3, 1, prefix_len=3), "prefix_len=3"),
        (lambda: Arrival(3, 1, time=math.nan), "time=nan"),
        (lambda: Arrival(3, 1, time=1e15), r"time=1000000000000000\.0 is not valid: use a number of seconds from 0 to"),
        (lambda: Arrival(3, 1, prefix_group=-1), "prefix_group=-1"),
    ],
)
def test_what_is_no_traffic_is_refused(make, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make()
