import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.shares import LayerShape, flop_share, measure_share
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


@pytest.mark.parametrize("argument", ["repeats", "warmup"])
@pytest.mark.parametrize("number", ["3", 1.5, None, True])
def test_numbers_of_calls_that_are_not_whole(argument: str, number: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{argument}={number!r}.*use a whole number"):
        time_median(lambda: None, **{argument: number})  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["n", "repeats"])
def test_a_share_is_measured_over_whole_numbers(argument: str) -> None:
    numbers = {"n": 4, "repeats": 1, argument: "3"}
    with pytest.raises(InvalidArgumentError, match=f"{argument}='3'.*use a whole number"):
        measure_share(shape=LayerShape(8, 8, 1, 1, 8), **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["mps", "gpu", "meta", None, "cuda:x", "cudax", 5])
def test_a_device_without_a_clock_is_refused_and_not_timed_by_the_processors(device: object) -> None:
    with pytest.raises(InvalidArgumentError, match="has no clock here: use 'cpu' or 'cuda'"):
        time_median(lambda: None, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="is not there"):
        time_median(lambda: None, device=device)


def test_a_device_may_be_an_object() -> None:
    assert len(time_median(lambda: None, repeats=2, device=torch.device("cpu")).samples) == 2


def test_a_share_of_flops_is_arithmetic_and_takes_the_points_of_a_curve() -> None:
    shape = LayerShape(8, 8, 1, 1, 8)
    assert flop_share(128.0, shape) == flop_share(128, shape)
