"""The highest rate within limits: against a scan of rates, by hand, and what it cannot find."""

import json

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.performance.simulator.capacity import Objective, Trial, find_max_rate
from vllm_teach.performance.simulator.deployment import Deployment, deploy
from vllm_teach.performance.simulator.serving import serve
from vllm_teach.performance.simulator.serving_table import format_capacity
from vllm_teach.performance.simulator.traffic import Traffic, draw_traffic
from vllm_teach.performance.virtual_time import Arrival, StepCost, quantile

_TTFT, _E2E, _TPOT = Objective("ttft", 0.4), Objective("e2e", 0.6, 0.5), 0.0115
ONE_BY_ONE = {"cost": StepCost(step=1.0, token=0.0), "max_num_seqs": 1, "num_kv_blocks": 8}


@pytest.fixture(scope="module")
def llama() -> Deployment:
    return deploy("llama-2-7b", "a100-80gb-sxm")


def p99_ttft(deployment: Deployment, workload: Traffic, rate: float) -> float:
    times = serve(deployment, workload.at_rate(rate)).run.times
    return quantile([each.to_first_token for each in times], 0.99)


def test_it_lies_where_a_scan_of_rates_leaves_the_limit(llama: Deployment) -> None:
    workload, limit = draw_traffic(60, (512, 8)), 0.4
    found = find_max_rate(llama, workload, Objective("ttft", limit))
    scan = [2.0 * 1.1**power for power in range(36)]  # 2 to 56 requests a second
    kept = [rate for rate in scan if p99_ttft(llama, workload, rate) <= limit]
    assert kept == scan[: len(kept)]
    assert max(kept) <= found.rate * 1.02
    assert found.rate <= max(kept) * 1.1 * 1.02
    assert p99_ttft(llama, workload, found.rate) <= limit < p99_ttft(llama, workload, found.refused)
    assert found.rate < found.refused <= found.rate * 1.02


def test_trials_are_told_and_kept(llama: Deployment) -> None:
    told: list[Trial] = []
    found = find_max_rate(
        llama, draw_traffic(30, SHAREGPT), Objective("tpot", _TPOT, 0.9), resolution=0.1, on_trial=told.append
    )
    assert tuple(told) == found.trials
    by_rate = {each.rate: each.kept for each in found.trials}
    assert by_rate[found.rate]
    assert not by_rate[found.refused]
    assert all(each.kept == (each.latencies[0] <= _TPOT) for each in found.trials)
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["modelled"] is True
    assert len(plain["trials"]) == len(told)


def test_all_objectives_are_kept(llama: Deployment) -> None:
    workload = draw_traffic(60, (512, 32))
    each = [find_max_rate(llama, workload, objective).rate for objective in (_TTFT, _E2E)]
    both = find_max_rate(llama, workload, _TTFT, _E2E)
    assert both.rate == pytest.approx(min(each), rel=0.03)
    assert len(both.trials[0].latencies) == 2


def test_burstier_requests_leave_room_for_fewer(llama: Deployment) -> None:
    workload = draw_traffic(100, (512, 32))
    calm, bursty = (find_max_rate(llama, workload, _TTFT, burstiness=b, resolution=0.05).rate for b in (4.0, 0.25))
    assert bursty < 0.8 * calm


def test_a_server_by_hand() -> None:
    """One request at a time, a second each: of two that come 0.75 seconds apart, the second waits a quarter."""
    deployment = deploy("tiny", "l4", **ONE_BY_ONE)
    workload = Traffic((Arrival(4, 1), Arrival(4, 1)), "two", "")
    found = find_max_rate(deployment, workload, Objective("e2e", 1.25, 1.0), resolution=1e-4)
    first, second = (each.time for each in workload.at_rate(1.0).arrivals)
    assert (second - first) / found.rate == pytest.approx(0.75, rel=2e-4)


def test_a_limit_that_one_request_alone_misses(llama: Deployment) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"seconds=0\.15 for e2e p99 is never kept.*a request takes \d"
    ) as told:
        find_max_rate(llama, draw_traffic(20, (512, 512)), Objective("e2e", 0.15))
    alone = serve(llama, draw_traffic(1, (512, 512))).run.times[0].latency
    assert f"{alone:.6g} s" in str(told.value)


def test_alone_a_request_finds_its_prefix_in_the_cache(llama: Deployment) -> None:
    """Most are quick because another one's prefix is there: a limit that only such requests keep can be kept."""
    workload = draw_traffic(60, (2000, 4)).with_shared_prefix(1984)
    cold = serve(llama, draw_traffic(1, (2000, 4))).run.times[0].to_first_token
    found = find_max_rate(llama, workload, Objective("ttft", cold / 4, 0.9), resolution=0.2)
    assert found.rate > 0
    with pytest.raises(InvalidArgumentError, match="never kept"):
        find_max_rate(llama, workload.with_shared_prefix(0), Objective("ttft", cold / 4, 0.9))


def test_too_few_requests_to_show_a_limit(llama: Deployment) -> None:
    with pytest.raises(InvalidArgumentError, match="num_requests=3 is too few: even all but at once"):
        find_max_rate(llama, draw_traffic(3, (64, 8)), Objective("ttft", 10.0))


def test_the_search_ends_where_only_all_at_once_miss() -> None:
    """The first of two that come one after the other is alone in its step, however soon the second one follows."""
    by_tokens = {"cost": StepCost(step=0.0, token=1.0), "max_num_seqs": 2, "num_kv_blocks": 8}
    deployment, workload = deploy("tiny", "l4", **by_tokens), draw_traffic(2, (4, 1))
    assert serve(deployment, workload).latencies["ttft"]["p50"] == 8
    with pytest.raises(InvalidArgumentError, match="num_requests=2 is too few"):
        find_max_rate(deployment, workload, Objective("ttft", 5.0, 0.5))


def test_a_rate_that_is_kept_only_because_few_requests_come_is_a_burst(llama: Deployment) -> None:
    few, many = (find_max_rate(llama, draw_traffic(n, (256, 64)), _TTFT, resolution=0.2) for n in (40, 400))
    assert few.is_burst
    assert few.rate > few.served == serve(llama, draw_traffic(40, (256, 64))).request_throughput
    assert not many.is_burst
    assert few.to_json()["is_burst"] is True
    assert "BUT NOT FOR LONG" in format_capacity(few, llama)
    assert "BUT NOT FOR LONG" not in format_capacity(many, llama)


def test_requests_that_come_together_at_any_rate() -> None:
    deployment = deploy("tiny", "l4", **ONE_BY_ONE)
    with pytest.raises(InvalidArgumentError, match=r"missed down to .* come together with burstiness=0\.0001"):
        find_max_rate(deployment, draw_traffic(20, (4, 1)), Objective("e2e", 1.5, 1.0), burstiness=1e-4)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Objective("latency", 1.0), "latency='latency'.*'e2e'"),
        (lambda: Objective("e2e", 0.0), r"seconds=0\.0"),
        (lambda: Objective("e2e", 1.0, 99), "share=99"),
        (lambda: find_max_rate(deploy("tiny", "l4"), draw_traffic(1, (4, 4))), "objectives is empty"),
        (
            lambda: find_max_rate(deploy("tiny", "l4"), draw_traffic(1, (4, 4)), _TTFT, resolution=0),
            "resolution=0",
        ),
        (  # the search would never end: no number lies between two neighbours
            lambda: find_max_rate(deploy("tiny", "l4"), draw_traffic(1, (4, 4)), _TTFT, resolution=1e-17),
            "resolution=1e-17.*from 1e-06",
        ),
    ],
)
def test_what_cannot_be_looked_for(make, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make()


def test_an_objective_in_words() -> None:
    assert str(Objective("e2e", 0.15)) == "e2e p99 within 150 ms"
