"""The figure of a simulated service, by its data."""

import matplotlib.pyplot as plt
import pytest

from vllm_teach.performance.simulator.deployment import deploy
from vllm_teach.performance.simulator.serving import ServingReport, serve
from vllm_teach.performance.simulator.traffic import draw_traffic
from vllm_teach.performance.virtual_time import StepCost
from vllm_teach.teaching.figures.simulated_service import draw_service_over_time, service_over_time


@pytest.fixture
def report() -> ServingReport:
    cost = StepCost(step=2.0, token=0.0)
    return serve(deploy("tiny", "l4", cost=cost, num_kv_blocks=20, max_num_seqs=2), draw_traffic(3, (4, 4)))


def test_each_step_by_hand(report: ServingReport) -> None:
    data = service_over_time(report)
    assert data.times == (0, 2, 4, 6, 8, 10, 12, 14)
    assert data.running == (2, 2, 2, 2, 1, 1, 1, 1)
    assert data.waiting == (1, 1, 1, 1, 0, 0, 0, 0)
    assert data.kv_usage == (0.1,) * 4 + (0.05,) * 4
    assert data.prefill_rate == (4, 0, 0, 0, 2, 0, 0, 0)
    assert data.decode_rate == (0, 1, 1, 1, 0, 0.5, 0.5, 0.5)


def test_it_is_drawn_as_it_is(report: ServingReport) -> None:
    data = service_over_time(report, points=4)
    figure = draw_service_over_time(data, title="Two at a time (modelled)")
    sequences, cache, tokens = figure.axes
    assert list(sequences.lines[0].get_ydata()) == list(data.running)
    assert list(sequences.lines[1].get_ydata()) == list(data.waiting)
    assert list(tokens.lines[1].get_ydata()) == list(data.decode_rate)
    assert cache.get_ylim() == (0, 100)
    assert "modelled" in tokens.get_xlabel()
    plt.close(figure)
