import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing, time_median


def test_median_is_not_moved_by_one_slow_call() -> None:
    timing = Timing.of([1.0, 1.1, 9.0])
    assert (timing.median, timing.low, timing.high, timing.samples) == (1.1, 1.0, 9.0, (1.0, 1.1, 9.0))


def test_calls_are_counted_and_warmup_is_not_timed(clock) -> None:
    takes = [100.0, 2.0, 3.0, 6.0]  # the first is the warm-up
    calls: list[float] = []

    def work() -> None:
        calls.append(takes[len(calls)])
        clock.now += calls[-1]

    timing = time_median(work, repeats=3, warmup=1)
    assert calls == takes
    assert timing.samples == (3.0, 4.0, 7.0)  # the clock's own tick on top
    assert (timing.low, timing.median, timing.high) == (3.0, 4.0, 7.0)


@pytest.mark.parametrize(("arguments", "named"), [({"repeats": 0}, "repeats=0"), ({"warmup": -1}, "warmup=-1")])
def test_numbers_of_calls_that_make_no_sense(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        time_median(lambda: None, **arguments)
