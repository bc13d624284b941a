"""The columns of a simulation's steps, by hand."""

from vllm_teach.performance.simulator.step_series import COLUMNS, StepSeries
from vllm_teach.performance.virtual_time import Arrival, StepCost, simulate


def series_of(arrivals: list[Arrival], **config) -> StepSeries:
    series = StepSeries()
    simulate(arrivals, StepCost(step=1.0, token=0.0), block_size=4, watch=series, **config)
    return series


def test_each_step_by_hand() -> None:
    series = series_of([Arrival(3, 3), Arrival(6, 1, time=0.5)], max_num_seqs=1, max_num_batched_tokens=4)
    assert list(series.start) == [0, 1, 2, 3, 4]
    assert list(series.seconds) == [1] * 5
    assert list(series.prefill_tokens) == [3, 0, 0, 4, 2]
    assert list(series.decode_tokens) == [0, 1, 1, 0, 0]
    assert list(series.running) == [1] * 5
    assert list(series.waiting) == [1, 1, 1, 0, 0]  # it came while the first step was computed
    assert list(series.held_blocks) == [1, 1, 2, 1, 2]
    assert series.busy_seconds == 5
    assert series.mean("held_blocks") == 7 / 5


def test_an_idle_time_counts_in_no_mean() -> None:
    series = series_of([Arrival(3, 1), Arrival(3, 1, time=100.0)])
    assert list(series.start) == [0, 100]
    assert (series.busy_seconds, series.mean("running")) == (2, 1)


def test_thinned_rows_stand_for_equally_many_steps() -> None:
    series = series_of([Arrival(3, 10)])
    rows = series.thinned(5)
    assert set(rows) == set(COLUMNS)
    assert rows["start"] == [0, 2, 4, 6, 8]
    assert rows["seconds"] == [2] * 5
    assert rows["prefill_tokens"] == [3, 0, 0, 0, 0]
    assert rows["decode_tokens"] == [1, 2, 2, 2, 2]
    assert rows["held_blocks"] == [1, 2, 2, 3, 3]
    assert series.thinned(500)["start"] == list(series.start)
    assert sum(series.thinned(3)["decode_tokens"]) == 9
