"""What a balancing policy does to the slowest requests, over the load, and to the replicas, over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.fleet import FleetRun
from vllm_teach.performance.virtual_time import Arrival
from vllm_teach.teaching import style

MARKERS = {"round_robin": "^-", "random": "s--", "least_conn": "o-"}


@dataclass(frozen=True)
class FleetTail:
    """By policy, for each rate: the p99 of the time to the first token, and of the whole latency, in seconds."""

    rates: tuple[float, ...]
    first_token: dict[str, tuple[float, ...]]
    latency: dict[str, tuple[float, ...]]


def fleet_tail(runs: Mapping[str, Mapping[float, FleetRun]]) -> FleetTail:
    """Collect the figures of runs by policy and arrival rate; all policies need the same rates, two or more."""
    rates = [tuple(sorted(by_rate)) for by_rate in runs.values()]
    if not rates or len(set(rates)) != 1 or len(rates[0]) < 2:
        raise InvalidArgumentError(f"runs has the rates {rates}: give each policy the same two or more.")
    return FleetTail(
        rates[0],
        {name: tuple(by_rate[rate].to_first_token(0.99) for rate in rates[0]) for name, by_rate in runs.items()},
        {name: tuple(by_rate[rate].latency(0.99) for rate in rates[0]) for name, by_rate in runs.items()},
    )


def draw_fleet_tail(data: FleetTail, *, title: str) -> Figure:
    """Draw two panels over the arrival rate, a line a policy; returns the figure."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8))
    for ax, lines, name in ((left, data.first_token, "first token, p99"), (right, data.latency, "whole answer, p99")):
        for policy, values in lines.items():
            ax.plot(data.rates, values, MARKERS[policy], color=style.colour(policy), label=policy)
        style.label_axis(ax, "x", "requests a second, all replicas")
        style.label_axis(ax, "y", name, unit="s, modelled")
        ax.set_ylim(0, 1.1 * max(max(values) for values in lines.values()))
    left.legend(loc="upper left")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure


def draw_in_flight(
    runs: Mapping[str, FleetRun], arrivals: Sequence[Arrival], places: int, *, title: str, top: float | None = None
) -> Figure:
    """Draw for each policy how many requests each replica had whenever one arrived, a line a replica.

    A dotted line stands at its `places`: what lies above waits. `top` ends the axis.
    """
    figure, axes = plt.subplots(1, len(runs), figsize=(8.4, 3.2), sharex=True, sharey=True, squeeze=False)
    order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].time)
    times = [arrivals[index].time for index in order]
    for (policy, run), ax in zip(runs.items(), axes[0], strict=True):
        for replica in range(len(run.in_flight[0])):
            counts = [run.in_flight[index][replica] for index in order]
            shade = style.tint(style.colour(policy), 1.0 - 0.22 * replica)
            ax.step(times, counts, where="post", color=shade, linewidth=1.4)
        ax.axhline(places, color=style.colour("limit"), linestyle=":", linewidth=1.4)
        ax.set_title(policy, size=11, weight="normal")
        style.label_axis(ax, "x", "time", unit="s, modelled")
    style.label_axis(axes[0][0], "y", "requests in flight")
    axes[0][0].set_ylim(0, top)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
