import time

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing, time_median


def test_median_is_not_moved_by_one_slow_call() -> None:
    timing = Timing.of([1.0, 1.1, 9.0])
    assert (timing.median, timing.low, timing.high, timing.samples) == (1.1, 1.0, 9.0, (1.0, 1.1, 9.0))


def test_calls_are_counted_and_warmup_is_not_timed() -> None:
    calls: list[int] = []

    def slow_at_first() -> None:
        calls.append(1)
        time.sleep(0.2 if len(calls) == 1 else 0.002)

    timing = time_median(slow_at_first, repeats=3, warmup=1)
    assert len(calls) == 4
    assert len(timing.samples) == 3
    assert 0.002 <= timing.low <= timing.median <= timing.high
    assert timing.low < 0.2


@pytest.mark.parametrize(("arguments", "named"), [({"repeats": 0}, "repeats=0"), ({"warmup": -1}, "warmup=-1")])
def test_numbers_of_calls_that_make_no_sense(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        time_median(lambda: None, **arguments)
