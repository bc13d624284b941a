"""The client's own delay, by a clock that the test holds."""

import pytest

from vllm_teach.performance.load_test.log_histogram import ACCURACY
from vllm_teach.performance.load_test.loop_watch import INTERVAL, LATE, ROUNDING, LoopWatch


def test_a_loop_that_is_on_time_is_never_behind() -> None:
    watch = LoopWatch()
    watch.start(10.0, 2.0)
    for tick in range(1, 101):
        watch.note(10.0 + tick * INTERVAL + ROUNDING + LATE / 2, 2.0 + tick * INTERVAL / 4)
    assert watch.delays.count == 100
    assert watch.behind == 0.0
    assert watch.delays.high == pytest.approx(LATE / 2)
    assert watch.cpu == pytest.approx(0.25, rel=0.01)


def test_every_instant_of_a_stall_counts_with_its_own_delay() -> None:
    """An answer that had come at any moment of a second's stall would have waited for the rest of that second."""
    watch = LoopWatch()
    watch.start(0.0, 0.0)
    watch.note(1.0, 1.0)
    watch.note(2.0, 1.0)  # and a second one
    instants = 2 / INTERVAL
    assert watch.delays.count == pytest.approx(instants, abs=1)
    assert watch.delays.high == pytest.approx(1.0, abs=2 * INTERVAL)
    assert watch.delays.quantile(0.5) == pytest.approx(0.5, abs=2 * INTERVAL + ACCURACY)
    assert watch.behind == pytest.approx(1 - LATE - ROUNDING, abs=0.01)


def test_it_says_when_it_is_next_due() -> None:
    watch = LoopWatch()
    watch.start(0.0, 0.0)
    assert watch.note(INTERVAL * 2.5, 0.0) == pytest.approx(INTERVAL / 2)
    assert watch.delays.count == 2


def test_nothing_watched_is_no_delay() -> None:
    assert LoopWatch().to_json()["delay"] is None
    assert (LoopWatch().behind, LoopWatch().cpu) == (0.0, 0.0)
