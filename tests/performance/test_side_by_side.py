from collections.abc import Callable

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.side_by_side import race


def runner(clock, order: list[str], name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
    def run() -> None:
        clock.now += seconds(order.count(name))
        order.append(name)

    return run


def test_a_slow_round_slows_both_and_leaves_their_ratio(clock) -> None:
    order: list[str] = []
    load = [1.0, 1.0, 10.0, 1.0]  # the warm-up, then three rounds, the second of them on a busy machine
    runners = {
        "a": runner(clock, order, "a", lambda call: 1024 * load[call]),
        "b": runner(clock, order, "b", lambda call: 4096 * load[call]),
    }
    result = race(runners, "a", rounds=3)
    assert result.ratios["b"].samples == pytest.approx((4, 4, 4), rel=0.01)  # the clock's own tick moves them a little
    assert result.ratios["a"].samples == (1, 1, 1)
    assert result.seconds["a"].high == pytest.approx(10240, rel=0.01)
    assert result.seconds["b"].median == pytest.approx(4096, rel=0.01)


def test_everybody_runs_once_a_round_and_each_begins_one(clock) -> None:
    order: list[str] = []
    runners = {name: runner(clock, order, name, lambda call: 1.0) for name in "abc"}
    race(runners, "c", rounds=3, warmup=0)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_who_has_a_clock_of_its_own_tells_its_seconds() -> None:
    result = race({"a": lambda: 2.0, "b": lambda: 6.0}, "a", rounds=3, measure=lambda run: run())
    assert result.seconds["b"].samples == (6.0, 6.0, 6.0)
    assert result.ratios["b"].samples == (3.0, 3.0, 3.0)


def test_arguments_that_make_no_race() -> None:
    with pytest.raises(InvalidArgumentError, match="baseline is 'sdpa'; choose one of ours"):
        race({"ours": lambda: None}, "sdpa")
    with pytest.raises(InvalidArgumentError, match="rounds=0"):
        race({"ours": lambda: None}, "ours", rounds=0)
    with pytest.raises(InvalidArgumentError, match="warmup=-1"):
        race({"ours": lambda: None}, "ours", warmup=-1)


def test_each_call_is_announced_outside_the_time_that_is_taken(clock) -> None:
    order: list[str] = []
    runners = {name: runner(clock, order, name, lambda call: 1.0) for name in "ab"}

    def announce(name: str) -> None:
        clock.now += 1000.0
        order.append(name.upper())

    result = race(runners, "a", rounds=2, announce=announce)
    assert "".join(order) == "AaBbAaBbBbAa"
    assert result.seconds["b"].high < 10
