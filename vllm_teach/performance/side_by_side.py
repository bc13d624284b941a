"""Compare implementations on a machine that is never quite idle: all of them in every round, as ratios of one round.

Two timings taken minutes apart differ by whatever else the machine did in between. A round runs everybody once, one
directly after the other, so that a slow minute slows all of them; the ratio to the baseline of the same round survives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing, check_calls, device_name, stopwatch

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Race:
    """What `race` measured: the seconds of each runner, and their ratios to the baseline's of the same round."""

    baseline: str
    seconds: dict[str, Timing]
    ratios: dict[str, Timing]


def race(
    runners: Mapping[str, Callable[[], _Result]],
    baseline: str,
    *,
    rounds: int = 7,
    warmup: int = 1,
    device: str = "cpu",
    measure: Callable[[Callable[[], _Result]], float] | None = None,
    announce: Callable[[str], object] | None = None,
    enough: float = inf,
) -> Race:
    """Call every runner once in each of `rounds` rounds, after `warmup` calls of each, and compare their seconds.

    The order changes from round to round, as each may find the caches as its predecessor left them. `measure` calls a
    runner and returns its seconds, by the clock of `device` unless it is given. `announce` is told the name of each
    runner before it is called, outside the time that is taken: for a progress bar. From the third round on it is over
    when the samples make `enough` seconds. Raises InvalidArgumentError when there is no runner called `baseline`, for
    fewer than one round, and for a device without a clock here.
    """
    check_calls("rounds", rounds, 1, "measures nothing")
    check_calls("warmup", warmup, 0, "is no number of calls")
    if baseline not in runners:
        raise InvalidArgumentError(f"baseline is {baseline!r}; choose one of {', '.join(runners)}.")
    once = measure or stopwatch(device_name(device, "clock"))
    names = list(runners)
    announce = announce or (lambda name: None)
    for name in names:
        for _ in range(warmup):
            announce(name)
            runners[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number > 1 and sum(map(sum, samples.values())) > enough:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            announce(name)
            samples[name].append(once(runners[name]))
    ratios = {
        name: [mine / base for mine, base in zip(samples[name], samples[baseline], strict=True)] for name in names
    }
    return Race(
        baseline,
        {name: Timing.of(samples[name]) for name in names},
        {name: Timing.of(ratios[name]) for name in names},
    )
