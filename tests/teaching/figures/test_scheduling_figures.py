"""Lesson 08's figures, by their data: places, step bars, sweeps, costs, the adaptive budget."""

import math

import pytest
from matplotlib import pyplot as plt

from vllm_teach.engine.events import EventLog
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.virtual_time import Arrival, StepCost, simulate
from vllm_teach.teaching.figures.adaptive_budget import adaptive_budget, draw_adaptive_budget
from vllm_teach.teaching.figures.batch_places import batch_places, draw_batch_places
from vllm_teach.teaching.figures.budget_sweep import budget_sweep, draw_budget_sweep
from vllm_teach.teaching.figures.budget_view import draw_budget_view
from vllm_teach.teaching.figures.held_blocks import draw_held_blocks
from vllm_teach.teaching.figures.preemption_costs import CostCurves, draw_cost_curves, modelled_curves
from vllm_teach.teaching.figures.step_budget import StepBar, draw_step_bars, step_bars, step_table
from vllm_teach.teaching.figures.token_gaps import draw_token_gaps

COST = StepCost(step=1.0, token=0.0)
THREE = [Arrival(3, 4), Arrival(2, 1), Arrival(5, 2)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def run(**config):
    return simulate(THREE, COST, **{"max_num_seqs": 2, "max_num_batched_tokens": 8, **config})


def test_places_of_a_static_batch() -> None:
    data = batch_places(run(batching="static").events, 2)
    assert data.stays == ((0, 0, 0.0, 4.0), (1, 1, 0.0, 1.0), (0, 2, 4.0, 6.0))
    assert data.seconds == 6
    assert data.empty == pytest.approx(1 - 7 / 12)
    assert data.busy == pytest.approx(7 / 12)
    assert [(box.seq_id, box.phase, box.num_tokens) for box in data.boxes if box.start == 4] == [(2, "prefill", 5)]


def test_a_free_place_is_taken_at_once_by_continuous_batching() -> None:
    data = batch_places(run().events, 2)
    assert data.stays == ((0, 0, 0.0, 4.0), (1, 1, 0.0, 1.0), (1, 2, 1.0, 3.0))
    assert data.seconds == 4


def test_a_place_without_a_part_in_the_step_is_neither_empty_nor_busy() -> None:
    data = batch_places(run(batching="prefill_first").events, 2)
    assert data.busy < 1 - data.empty


def test_a_preempted_sequence_leaves_its_place() -> None:
    arrivals = [Arrival(4, 6), Arrival(4, 6)]
    events = simulate(arrivals, COST, num_blocks=4, block_size=4, watermark=0.0).events
    data = batch_places(events, 2)
    assert [seq_id for _, seq_id, _, _ in data.stays].count(1) == 2


def test_places_need_steps_and_room() -> None:
    with pytest.raises(InvalidArgumentError, match="no step"):
        batch_places(EventLog(), 2)
    with pytest.raises(InvalidArgumentError, match="num_places=1"):
        batch_places(run().events, 1)


def test_places_are_drawn_for_each_panel() -> None:
    data = batch_places(run().events, 2)
    figure = draw_batch_places({"one": data, "two": data}, {0: "A", 1: "B", 2: "C"}, title="x")
    assert [ax.get_title() for ax in figure.axes] == ["one: 4000 ms", "two: 4000 ms"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["A", "B", "C"]


def test_step_bars_and_table() -> None:
    events = run().events
    bars = step_bars(events)
    assert [(bar.prefill, bar.decode, bar.budget) for bar in bars] == [(5, 0, 8), (5, 1, 8), (0, 2, 8), (0, 1, 8)]
    assert [bar.tokens for bar in bars] == [5, 6, 2, 1]
    assert [(bar.start, bar.end) for bar in bars] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    lines = step_table(events, {0: "A", 1: "B", 2: "C"}).splitlines()
    assert lines[0].split() == ["step", "A", "B", "C", "tokens"]
    assert [line.split() for line in lines[1:3]] == [["1", "3", "2", ".", "5"], ["2", "1", ".", "5", "6"]]
    ax = draw_step_bars(bars, seconds=10, top=20).axes[0]
    assert ax.get_xlim() == (0, 10_000)
    assert ax.get_ylim() == pytest.approx((0, 21.6))
    assert len(ax.patches) == 6  # five kinds of tokens in four steps, and the budget
    with pytest.raises(InvalidArgumentError, match="no step"):
        step_bars(EventLog())


def test_a_sweep_is_in_the_order_of_the_budgets() -> None:
    runs = {b: run(max_num_batched_tokens=b) for b in (8, 4)}
    data = budget_sweep(runs)
    assert data.budgets == (4, 8)
    assert data.num_steps == (5, 4)
    assert data.throughput == pytest.approx((7 / 5, 7 / 4))
    assert data.gap_p99 == (1.0, 1.0)
    assert data.ttft_p50 == (2.0, 1.0)
    assert data.ttft_p99 == (4.0, 2.0)
    assert len(draw_budget_sweep(data, title="x").axes[1].lines) == 3
    with pytest.raises(InvalidArgumentError, match="1 budgets"):
        budget_sweep({8: runs[8]})


def test_only_steps_with_decodes_count_for_the_target() -> None:
    bars = (StepBar(0, 5, 0, 100, 100), StepBar(5, 8, 2, 10, 100), StepBar(8, 9, 2, 0, 50))
    data = adaptive_budget(bars, target=2.0)
    assert (data.steps, data.seconds, data.budgets) == ((2, 3), (3, 1), (100, 50))
    assert (data.over(), data.over(1)) == (0.5, 0.0)
    assert len(draw_adaptive_budget(data, data, title="x", last_step=3).axes) == 2
    with pytest.raises(InvalidArgumentError, match="no step with decodes"):
        adaptive_budget(bars[:1], 2.0)


def test_cost_curves_are_the_models() -> None:
    costs = PreemptionCosts(86e-6, 3.4e-9, 512 * 1024, 10e9)
    data = modelled_curves(costs, (64, 16384))
    assert data.recompute == (costs.recompute_seconds(64), costs.recompute_seconds(16384))
    assert data.swap == (costs.swap_seconds(64), costs.swap_seconds(16384))
    assert data.swap[0] > data.recompute[0]
    assert data.swap[1] < data.recompute[1]
    assert 64 < data.crossover < 16384
    never = CostCurves((64, 128), (1.0, 2.0), (3.0, 4.0), math.inf)
    axes = draw_cost_curves({"a": data, "b": never}, title="x").axes
    assert [len(ax.lines) for ax in axes] == [3, 2]  # the crossing has a line of its own, where it is in sight
    with pytest.raises(InvalidArgumentError, match="panels is empty"):
        draw_cost_curves({}, title="x")


def test_held_blocks_and_gaps_draw_what_they_are_given() -> None:
    ax = draw_held_blocks({"leaky": [4, 4, 8], "right": [0, 0, 0]}, 16, title="x").axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == [[16, 16], [4, 4, 8], [0, 0, 0]]
    ax = draw_token_gaps({"alone": [0.1, 0.2]}, title="x").axes[0]
    assert list(ax.lines[0].get_xdata()) == [2, 3]
    assert list(ax.lines[0].get_ydata()) == [0.1, 0.2]


def test_the_view_of_a_budget_has_one_time_axis() -> None:
    events = run().events
    names = {0: "A", 1: "B", 2: "C"}
    figure = draw_budget_view(batch_places(events, 2), step_bars(events), names, title="x", seconds=10)
    top, bottom = figure.axes
    assert top.get_xlim() == bottom.get_xlim() == (0, 10_000)
    assert bottom.get_ylim()[1] > 8  # the budget
