"""What a wrong choice costs: the time of the chosen backend over that of the fastest, for each call and policy."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import Timing
from vllm_teach.teaching import style

_LOOKS = (("o", "baseline"), ("D", "limit"), ("s", "measured"), ("^", "sdpa"))


@dataclass(frozen=True)
class Regret:
    """For each policy and call: the backend chosen and its time over the fastest one's (1 is no regret)."""

    calls: tuple[str, ...]
    best_seconds: tuple[float, ...]
    choice: dict[str, tuple[str, ...]]
    ratio: dict[str, tuple[float, ...]]

    def worst(self, policy: str) -> float:
        """The largest regret of a policy."""
        return max(self.ratio[policy])

    def typical(self, policy: str) -> float:
        """The geometric mean of a policy's regrets: the factor by which it is slower in an average call."""
        return math.exp(statistics.fmean(math.log(ratio) for ratio in self.ratio[policy]))

    def total(self, policy: str) -> float:
        """The time of all calls one after the other over that of the best choices: long calls weigh most."""
        taken = sum(best * ratio for best, ratio in zip(self.best_seconds, self.ratio[policy], strict=True))
        return taken / sum(self.best_seconds)

    def within(self, policy: str, factor: float) -> int:
        """In how many calls the choice took at most `factor` times the fastest one's time."""
        return sum(ratio <= factor for ratio in self.ratio[policy])


def regret(
    timed: Mapping[str, Mapping[str, Timing]], policies: Mapping[str, Callable[[str, tuple[str, ...]], str]]
) -> Regret:
    """Compare what `policies[policy](call, backends timed)` chooses with the fastest by `timed[call][backend]`.

    A ratio is the median over rounds, the n-th samples of two backends being of one round. Raises InvalidArgumentError
    for a choice that was not timed.
    """
    choice: dict[str, tuple[str, ...]] = {}
    ratio: dict[str, tuple[float, ...]] = {}
    for policy, choose in policies.items():
        choice[policy] = tuple(choose(call, tuple(times)) for call, times in timed.items())
        ratio[policy] = tuple(
            _ratio(times, name, call) for name, (call, times) in zip(choice[policy], timed.items(), strict=True)
        )
    best = tuple(min(one.median for one in times.values()) for times in timed.values())
    return Regret(tuple(timed), best, choice, ratio)


def _ratio(times: Mapping[str, Timing], name: str, call: str) -> float:
    if name not in times:
        raise InvalidArgumentError(f"{name!r} was chosen for {call!r} and not timed; choose one of {', '.join(times)}.")
    fastest = min(times, key=lambda one: times[one].median)
    pairs = zip(times[name].samples, times[fastest].samples, strict=True)
    return max(1.0, statistics.median(mine / best for mine, best in pairs))


def draw_regret(data: Regret) -> Figure:
    """Draw a row per call and a mark per policy, at its time over the fastest one's; 1.2 is drawn as a line."""
    figure, ax = plt.subplots(figsize=(8.4, 0.44 * len(data.calls) + 1.7))
    rows = range(len(data.calls))
    for row in rows:
        ax.axhline(row, color="#E2E2E2", linewidth=0.8, zorder=0)
    ax.axvspan(1, 1.2, color=style.tint(style.colour("sdpa"), 0.18), zorder=0, label="within 1.2 of the fastest")
    for index, (policy, ratios) in enumerate(data.ratio.items()):
        marker, concept = _LOOKS[index % len(_LOOKS)]
        lift = 0.5 * ((index + 0.5) / len(data.ratio) - 0.5)  # marks at one place lie beside each other
        places = [row + lift for row in rows]
        ax.plot(ratios, places, marker, color=style.colour(concept), markersize=7.5, label=policy, zorder=3)
    ax.set_yticks(rows, data.calls)
    ax.set_ylim(len(data.calls) - 0.5, -0.5)
    end = max(2.0, 1.15 * max(map(data.worst, data.ratio)))
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200) if tick <= end]
    style.label_axis(ax, "x", "time of the choice over the fastest", log=10, ticks=ticks)
    ax.set_xticklabels([f"{tick:g}" for tick in ticks])
    ax.set_xlim(0.96, end)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=len(data.ratio) + 1)
    return figure
