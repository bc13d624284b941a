"""What a simulated service reports, by hand and against the run's own times; and the shapes that papers publish."""

import json
from itertools import pairwise
from statistics import mean

import pytest

from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.kvcache.occupancy import compare_occupancy
from vllm_teach.performance.simulator.deployment import deploy
from vllm_teach.performance.simulator.serving import LATENCIES, latencies_of, serve, simulate_serving
from vllm_teach.performance.simulator.traffic import Traffic, draw_traffic
from vllm_teach.performance.virtual_time import Arrival, RequestTimes, StepCost

COST = StepCost(step=1.0, token=0.0)


def test_two_requests_by_hand() -> None:
    workload = Traffic((Arrival(4, 3), Arrival(4, 1, time=10.5)), "by hand", "")
    report = simulate_serving("tiny", "l4", workload=workload, cost=COST, num_kv_blocks=8, block_size=4)
    assert report.run.seconds == 11.5
    assert report.request_throughput == 2 / 11.5
    assert report.output_throughput == 4 / 11.5
    assert report.total_throughput == 12 / 11.5
    latencies = report.latencies
    assert latencies["ttft"]["mean"] == 1
    assert latencies["itl"] == {"count": 2, "mean": 1, "p50": 1, "p90": 1, "p95": 1, "p99": 1, "max": 1}
    assert latencies["tpot"]["count"] == 1
    assert (latencies["e2e"]["p50"], latencies["e2e"]["max"]) == (1, 3)
    assert report.mean_kv_usage == pytest.approx((1 + 2 + 2 + 1) / 4 / 8)
    assert report.peak_kv_usage == 2 / 8


def test_latencies_come_from_the_requests_own_times() -> None:
    times = [RequestTimes(1.0, (2.0, 4.0, 5.0)), RequestTimes(0.0, (3.0,))]
    assert {name: latencies_of(times, name) for name in LATENCIES} == {
        "ttft": [1.0, 3.0],
        "itl": [2.0, 1.0],
        "tpot": [1.5],
        "e2e": [4.0, 3.0],
    }


def test_single_tokens_have_no_gaps() -> None:
    report = serve(deploy("tiny", "l4", cost=COST), draw_traffic(3, (4, 1)))
    assert report.latencies["itl"] is report.latencies["tpot"] is None
    json.dumps(report.to_json())


def test_the_report_is_plain_data_and_says_what_it_is() -> None:
    report = serve(deploy("llama-2-7b", "a100-80gb-sxm"), draw_traffic(20, SHAREGPT, 4.0))
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["modelled"] is True
    assert plain["num_steps"] == report.run.num_steps
    assert sum(plain["steps"]["decode_tokens"]) + sum(plain["steps"]["prefill_tokens"]) == plain["computed_tokens"]
    assert plain["latencies"]["ttft"]["mean"] == pytest.approx(mean(each.to_first_token for each in report.run.times))
    assert plain["deployment"]["hardware"]["source"]


def test_a_run_without_its_events_has_the_same_figures() -> None:
    deployment, workload = deploy("tiny", "l4", num_kv_blocks=40), draw_traffic(20, (100, 50))
    whole, short = (serve(deployment, workload, max_events=most).to_json() for most in (None, 1))
    assert whole == short
    assert whole["preemptions"] > 0


def test_a_shared_prefix_is_computed_once() -> None:
    deployment = deploy("llama-2-7b", "a100-80gb-sxm")
    alone, shared = (serve(deployment, draw_traffic(30, (512, 8)).with_shared_prefix(n)) for n in (0, 400))
    # The first step begins with four of them, which find nothing yet.
    assert alone.run.num_computed - shared.run.num_computed == (30 - 4) * 400
    assert shared.to_json()["prefix_hit_rate"] == pytest.approx(26 * 400 / (30 * 512))
    without = serve(deploy("llama-2-7b", "a100-80gb-sxm", enable_prefix_caching=False), shared.workload)
    assert without.run.num_computed == alone.run.num_computed


def test_larger_batches_serve_more_a_second_until_arithmetic_is_the_limit() -> None:
    rates = [
        serve(deploy("llama-2-13b", "a100-80gb-sxm", max_num_seqs=n), draw_traffic(64, (64, 64))).output_throughput
        for n in (1, 4, 16, 64)
    ]
    gains = [after / before for before, after in pairwise(rates)]
    assert rates == sorted(rates)
    assert gains[0] > 3.3  # weights are read once for all
    assert gains == sorted(gains, reverse=True)


def test_chunked_prefill_bounds_the_time_between_tokens() -> None:
    """Agrawal et al. 2024 (Sarathi-Serve), figure 1: whole prompts stall the decodes beside them; chunks do not."""
    workload = draw_traffic(60, (3000, 100), 1.5)
    whole, chunked = (
        serve(deploy("llama-2-13b", "a100-80gb-sxm", **options), workload).latencies["itl"]
        for options in (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
            {"max_num_batched_tokens": 256},
        )
    )
    assert whole["p50"] == pytest.approx(chunked["p50"], rel=1.5)
    assert whole["p99"] > 4 * chunked["p99"]


def test_paging_holds_two_to_four_times_the_requests_of_reservation() -> None:
    """Kwon et al. 2023, figure 13: OPT-13B on an A100 with 40 GB, ShareGPT, against Orca's reservations."""
    deployment = deploy("opt-13b-like", "a100-40gb-sxm")
    slots = deployment.num_blocks * 16
    assert deployment.num_blocks * deployment.memory.block_bytes == pytest.approx(12e9, rel=0.1)  # their table 1
    paged, *reserved = compare_occupancy(SHAREGPT.draw(400, 0), slots, max_lens=(2048,))
    gains = {each.name: paged.mean_in_flight / each.mean_in_flight for each in reserved}
    assert gains["max (2048)"] == pytest.approx(4.3, rel=0.15)
    assert gains["oracle"] == pytest.approx(2.2, rel=0.15)
    # The scheduler fills the cache as that bookkeeping does.
    run = serve(deployment, draw_traffic(400, SHAREGPT), max_events=1)
    waited = [n for n, waiting in zip(run.series.running, run.series.waiting, strict=True) if waiting]
    assert mean(waited) == pytest.approx(paged.mean_in_flight, rel=0.1)
