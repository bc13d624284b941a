"""Lesson 11's figures: their data against what was drawn from, and what is drawn against the data."""

import math
import random
from itertools import combinations

import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.fleet import Patience, simulate_fleet
from vllm_teach.performance.load_test.loop_watch import LoopWatch
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.report import LoadReport
from vllm_teach.performance.load_test.spans import Spans
from vllm_teach.performance.load_test.tally import LoadTally
from vllm_teach.performance.virtual_time import Arrival, StepCost
from vllm_teach.serving.metrics.scrape import Scrape
from vllm_teach.teaching.figures.bucket_quantile import bucket_quantile, draw_bucket_quantile, to_buckets
from vllm_teach.teaching.figures.fleet_tail import draw_fleet_tail, draw_in_flight, fleet_tail
from vllm_teach.teaching.figures.load_sweep import draw_load_sweep, load_sweep
from vllm_teach.teaching.figures.patience_bars import draw_patience
from vllm_teach.teaching.figures.rank_layer import draw_rank_layer, rank_layer
from vllm_teach.teaching.figures.request_spans import draw_request_spans
from vllm_teach.teaching.figures.server_gauges import draw_server_gauges, gauge_series
from vllm_teach.teaching.figures.worker_sweep import draw_worker_sweep, relative_throughput

ARRIVALS = [Arrival(10, 5 + 20 * (i % 2), time=0.05 * i) for i in range(24)]
POLICIES = ("round_robin", "least_conn")


def fleet(policy: str = "least_conn", replicas: int = 2, **more):
    return simulate_fleet(ARRIVALS, StepCost(), replicas, policy, max_num_seqs=4, max_num_batched_tokens=64, **more)


def test_buckets_are_counted_as_prometheus_does() -> None:
    assert to_buckets([0.1, 0.5, 0.6, 9.0], [0.5, 1.0]) == [(0.5, 2), (1.0, 3), (math.inf, 4)]


def test_a_quantile_lies_in_the_true_ones_bucket() -> None:
    source, bounds = random.Random(0), [0.1, 0.2, 0.5, 1, 2, 5]
    for _ in range(50):
        values = sorted(source.lognormvariate(-1, 1) for _ in range(101))
        for share in (0.05, 0.5, 0.9, 0.99):
            found = bucket_quantile(to_buckets(values, bounds), share)
            true = values[math.ceil(share * 101) - 1]
            assert found.low < true <= found.high
            assert found.low <= found.value <= found.high


def test_a_quantile_by_hand() -> None:
    buckets = [(1.0, 10.0), (2.0, 20.0), (3.0, 20.0), (math.inf, 25.0)]
    assert bucket_quantile(buckets, 0.2).value == 0.5
    assert bucket_quantile(buckets, 0.6).value == 1.5
    assert bucket_quantile(buckets, 0.9).value == 3.0
    for wrong in ([], [(1.0, 5.0)], [(1.0, 0.0), (math.inf, 0.0)]):
        with pytest.raises(InvalidArgumentError):
            bucket_quantile(wrong, 0.5)


def test_the_reading_and_the_truth_are_drawn() -> None:
    buckets = [(1.0, 10.0), (2.0, 20.0), (math.inf, 20.0)]
    figure = draw_bucket_quantile(buckets, bucket_quantile(buckets, 0.75), 1.7, title="t")
    at = [line.get_xdata()[0] for line in figure.axes[0].lines if len(set(line.get_xdata())) == 1]
    assert at == [1.5, 1.7]
    plt.close(figure)


def test_spans() -> None:
    spans = {"one": Spans(((0.0, 1.0), (0.0, 2.5)), ((0.1, 0.4), (0.5, 0.6))), "two": Spans(((0.0, 0.5),))}
    assert spans["one"].slowest_health == pytest.approx(0.3)
    assert spans["two"].slowest_health == 0
    figure = draw_request_spans(spans, title="t")
    assert [patch.get_width() for patch in figure.axes[0].patches] == pytest.approx([1.0, 2.5, 0.3, 0.1])
    # A check that took no time is a line, and must have the colour that the caption names.
    plain = [patch.get_edgecolor() == patch.get_facecolor() for patch in figure.axes[0].patches]
    assert plain == [False, False, True, True]
    plt.close(figure)
    with pytest.raises(InvalidArgumentError):
        draw_request_spans({"none": Spans(())}, title="t")


def scrape_at(moment: float, tokens: float, running: float) -> Scrape:
    values = {
        "vllm:generation_tokens_total": tokens,
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": 2 * running,
        "vllm:kv_cache_usage_perc": running / 10,
    }
    return Scrape({(name, ()): value for name, value in values.items()}, moment)


def test_gauges_and_rates() -> None:
    data = gauge_series([scrape_at(10.0, 100, 1), scrape_at(10.5, 120, 3), scrape_at(12.5, 120, 0)])
    assert data.times == (0.0, 0.5, 2.5)
    assert data.tokens_per_second == (40.0, 0.0)
    assert data.waiting == (2, 6, 0)
    figure = draw_server_gauges(data, title="t")
    assert len(figure.axes) == 3
    plt.close(figure)
    with pytest.raises(InvalidArgumentError):
        gauge_series([scrape_at(0, 0, 0)])


def test_the_tail_by_policy_and_what_was_in_flight() -> None:
    runs = {name: {replicas: fleet(name, replicas) for replicas in (2, 3)} for name in POLICIES}
    data = fleet_tail(runs)
    assert data.rates == (2, 3)
    assert data.first_token["round_robin"][0] == runs["round_robin"][2].to_first_token(0.99)
    assert data.latency["least_conn"][1] == runs["least_conn"][3].latency(0.99)
    figure = draw_fleet_tail(data, title="t")
    assert [line.get_label() for line in figure.axes[0].lines] == list(POLICIES)
    plt.close(figure)
    shown = {name: runs[name][2] for name in POLICIES}
    figure = draw_in_flight(shown, ARRIVALS, 4, title="t")
    for ax, run in zip(figure.axes, shown.values(), strict=True):
        assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[c[r] for c in run.in_flight] for r in range(2)]
        assert list(ax.lines[2].get_ydata()) == [4, 4]
    plt.close(figure)
    with pytest.raises(InvalidArgumentError):
        fleet_tail({"least_conn": {2: fleet()}})


def test_workers_and_patience() -> None:
    runs = {1: fleet(replicas=1), 2: fleet(replicas=2)}
    shares = relative_throughput(runs)
    assert shares == {1: 1.0, 2: runs[2].throughput / runs[1].throughput}
    with pytest.raises(InvalidArgumentError):
        relative_throughput({2: runs[2]})
    limited = fleet(replicas=1, patience=Patience(total=0.25))
    figure = draw_patience({"none": runs[1], "whole": limited}, title="t")
    bars = [[patch.get_width() for patch in ax.patches] for ax in figure.axes]
    assert bars[0] == [100, 100 * len(limited.answered) / len(ARRIVALS)]
    assert bars[1] == [0, 100 * limited.wasted_tokens / limited.computed_tokens]
    assert bars[1][1] > 0
    figure.draw_without_rendering()
    labels = [ax.xaxis.label.get_window_extent() for ax in figure.axes]
    assert not any(a.overlaps(b) for a, b in combinations(labels, 2))
    plt.close(figure)
    plt.close(draw_worker_sweep({"a": shares}, title="t"))


def test_a_layer_over_two_ranks() -> None:
    data = rank_layer((5, 4), (800, 736))
    assert data.all_reduces == 2
    captions = {box.name: box.caption for box in data.boxes}
    assert captions["q, k, v/0"] == "5 query heads"
    assert captions["down/1"] == "736 rows"
    assert not any(a.overlaps(b) for a, b in combinations(data.boxes, 2))
    inward = [(arrow.source, arrow.target) for arrow in data.arrows if arrow.target.startswith("sum")]
    assert inward == [("o/0", "sum/0"), ("o/1", "sum/0"), ("down/0", "sum/1"), ("down/1", "sum/1")]
    plt.close(draw_rank_layer(data, title="t"))


def test_a_sweep_over_clients() -> None:
    def report(clients: int) -> LoadReport:
        tally = LoadTally()
        for index in range(clients):
            first, end = 0.1 * clients, 0.1 * clients + 0.5
            times = {"first": first, "last": end, "end": end}
            record = RequestRecord(index, 4, 6, outcome="answered", output_tokens=6, tokens_from="usage", **times)
            record.gaps.extend([0.1] * 5)
            tally.add(record)
        return LoadReport(tally, LoopWatch(), "", "", {}, {})

    data = load_sweep({4: report(4), 1: report(1)})
    assert data.clients == (1, 4)
    assert data.throughput == pytest.approx((6 / 0.6, 24 / 0.9))
    assert data.ttft_p99 == pytest.approx((0.1, 0.4), rel=2e-3)
    assert data.itl_p99 == pytest.approx((0.1, 0.1), rel=2e-3)
    plt.close(draw_load_sweep(data, title="t"))
    with pytest.raises(InvalidArgumentError):
        load_sweep({1: report(1)})
