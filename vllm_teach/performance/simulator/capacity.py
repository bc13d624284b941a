"""How many requests a second a deployment takes before latency leaves its limits: capacity planning. Modelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm_teach.engine.field_checks import check_choice, check_number
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.simulator.deployment import Deployment
from vllm_teach.performance.simulator.serving import LATENCIES, latencies_of
from vllm_teach.performance.simulator.traffic import AT_ONCE, Traffic
from vllm_teach.performance.virtual_time import Arrival, RequestTimes, Simulation, quantile

# Rates are looked for between these multiples of what is served when all requests come at once. So far below it, no
# request waits for another unless they come together at any rate; so far above, they might as well all come at once.
_LEAST, _MOST = 2.0**-20, 2.0**20
_FINEST = 1e-6  # two rates that lie closer differ by rounding alone


@dataclass(frozen=True)
class Objective:
    """`share` of the requests have a latency, one of LATENCIES ("itl": of the gaps), of at most `seconds`."""

    latency: str
    seconds: float
    share: float = 0.99

    def __post_init__(self) -> None:
        check_choice("latency", self.latency, LATENCIES)
        check_number("seconds", self.seconds, 0, open_low=True, hint="use a number of seconds above 0")
        check_number("share", self.share, 0, 1, open_low=True, hint="use a share above 0 and at most 1")

    def of(self, run: Simulation) -> float:
        """Return the seconds that `share` of the run's latencies do not exceed; 0 where it has none."""
        values = latencies_of(run.times, self.latency)
        return quantile(values, self.share) if values else 0.0

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.latency} p{100 * self.share:g} within {1e3 * self.seconds:,.6g} ms"


@dataclass(frozen=True)
class Trial:
    """A rate that was tried, in requests a second, and the latencies by the objectives' order, in seconds."""

    rate: float
    latencies: tuple[float, ...]
    kept: bool


@dataclass(frozen=True)
class Capacity:
    """`rate` is the highest that kept to all `objectives`; `refused`, at most `resolution` above it, did not.

    `num_requests` were simulated at each rate. `served` is how many a second are, when all come at once.
    """

    rate: float
    refused: float
    served: float
    resolution: float
    objectives: tuple[Objective, ...]
    num_requests: int
    trials: tuple[Trial, ...]

    @property
    def is_burst(self) -> bool:
        """Whether more come than are served: so few requests end before the queue grows, and more would not keep."""
        return self.rate > self.served

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "modelled": True,
            "rate": self.rate,
            "refused_rate": self.refused,
            "served_rate": self.served,
            "is_burst": self.is_burst,
            "resolution": self.resolution,
            "objectives": [
                {"latency": each.latency, "share": each.share, "seconds": each.seconds} for each in self.objectives
            ],
            "num_requests": self.num_requests,
            "trials": [
                {"rate": each.rate, "latencies": list(each.latencies), "kept": each.kept} for each in self.trials
            ],
        }


def find_max_rate(
    deployment: Deployment,
    workload: Traffic,
    *objectives: Objective,
    burstiness: float = 1.0,
    seed: int = 0,
    resolution: float = 0.02,
    on_trial: Callable[[Trial], None] | None = None,
) -> Capacity:
    """Return the highest rate at which the requests of `workload` keep to all `objectives`, and a refused one above it.

    Each trial sends the same requests with the same gaps, stretched to its rate; the times that `workload` has are not
    used. The search begins at the rate that all requests at once attain, doubles or halves it until one is kept and
    another refused, and halves what lies between (on a logarithmic scale) until they are `resolution` apart, from 1e-6
    to 1. Where latency does not grow steadily with the rate, it finds one border of several. `on_trial` is told each
    trial.

    Raises InvalidArgumentError without an objective, when requests miss one even with the machine for themselves, when
    no rate is low enough, since requests of a burst come together at any, and when they keep to all at any rate.
    """
    if not objectives:
        raise InvalidArgumentError("objectives is empty: give at least one limit of a latency.")
    check_number("resolution", resolution, _FINEST, 1, hint=f"use a share from {_FINEST:g} to 1")
    trials: list[Trial] = []

    def judge(rate: float) -> Trial:
        run = deployment.simulate(workload.at_rate(rate, burstiness, seed), max_events=1)
        latencies = tuple(each.of(run) for each in objectives)
        kept = all(value <= each.seconds for value, each in zip(latencies, objectives, strict=True))
        return Trial(rate, latencies, kept)

    def try_rate(rate: float) -> Trial:
        trial = judge(rate)
        trials.append(trial)
        if on_trial is not None:
            on_trial(trial)
        return trial

    _check_alone(deployment, workload, objectives)
    served = len(workload.arrivals) / deployment.simulate(workload.at_rate(AT_ONCE), max_events=1).seconds
    if judge(_MOST * served).kept:  # not AT_ONCE: where the first step has one request, the others find another server
        raise InvalidArgumentError(
            f"num_requests={len(workload.arrivals)} is too few: even all but at once they keep to "
            f"{' and '.join(map(str, objectives))}, so give more of them."
        )
    kept = refused = try_rate(served)
    while refused.kept:
        kept, refused = refused, try_rate(min(2 * refused.rate, _MOST * served))
    while not kept.kept:
        if kept.rate < _LEAST * served:
            raise InvalidArgumentError(
                f"{' and '.join(map(str, objectives))} is missed down to {kept.rate:.2g} requests a second, by those "
                f"that come together with burstiness={burstiness:g} or find no prefix yet: allow more seconds."
            )
        refused, kept = kept, try_rate(kept.rate / 2)
    while refused.rate > kept.rate * (1 + resolution):
        middle = try_rate((kept.rate * refused.rate) ** 0.5)
        kept, refused = (middle, refused) if middle.kept else (kept, middle)
    return Capacity(kept.rate, refused.rate, served, resolution, objectives, len(workload.arrivals), tuple(trials))


def _check_alone(deployment: Deployment, workload: Traffic, objectives: tuple[Objective, ...]) -> None:
    """Raise InvalidArgumentError when a request after the other, each alone, would miss an objective."""
    requests = [replace(each, time=0.0, prefix_group=0) for each in workload.arrivals]
    alone = {each: _times_alone(deployment, workload, each) for each in set(requests)}
    times = [alone[each] for each in requests]
    for objective in objectives:
        values = latencies_of(times, objective.latency)
        best = quantile(values, objective.share) if values else 0.0
        if best > objective.seconds:
            raise InvalidArgumentError(
                f"seconds={objective.seconds:g} for {objective.latency} p{100 * objective.share:g} is never kept: "
                f"with the machine for itself a request takes {best:.6g} s (modelled), so allow at least that."
            )


def _times_alone(deployment: Deployment, workload: Traffic, request: Arrival) -> RequestTimes:
    """Its times with the machine for itself, and with its shared prefix in the cache, if the deployment has one."""
    [first] = deployment.simulate(replace(workload, arrivals=(request,)), max_events=1).times
    if not request.prefix_len:
        return first
    again = replace(request, time=2 * first.tokens[-1])
    return deployment.simulate(replace(workload, arrivals=(request, again)), max_events=1).times[1]
