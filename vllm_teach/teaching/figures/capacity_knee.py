"""A percentile of latency over the rate of requests: flat, then a knee, then a queue that only grows. Modelled."""

from collections.abc import Sequence
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.performance.simulator.capacity import Capacity, Trial
from vllm_teach.teaching import style


def growth(trials: Sequence[Trial]) -> list[float]:
    """Return by how much the first objective's latency grows from each rate, in order of rates, to the next."""
    ordered = [each.latencies[0] for each in sorted(trials, key=lambda trial: trial.rate)]
    return [after / before for before, after in pairwise(ordered)]


def draw_capacity_knee(
    trials: Sequence[Trial], capacity: Capacity, *, title: str, longer: Sequence[Trial] = ()
) -> Figure:
    """Draw the first objective's latency at each trial's rate, its limit, and the capacity; latency is logarithmic.

    `longer` are trials of a longer run, drawn as a second line.
    """
    objective = capacity.objectives[0]
    figure, ax = plt.subplots(figsize=(7.0, 3.9))
    for line, concept, marker, name in (
        (trials, "measured", "o", f"{capacity.num_requests:,} requests"),
        (longer, "naive", "s", "a longer run"),
    ):
        if line:
            ordered = sorted(line, key=lambda trial: trial.rate)
            x, y = [each.rate for each in ordered], [each.latencies[0] for each in ordered]
            ax.plot(x, y, marker=marker, color=style.colour(concept), label=name)
    ax.axhline(objective.seconds, color=style.colour("limit"), linewidth=1.5, linestyle="--")
    ax.text(
        0.01, objective.seconds * 1.06, f"limit {style.format_seconds(objective.seconds)}", size=10, va="bottom",
        color=style.colour("limit"), transform=ax.get_yaxis_transform(),
    )  # fmt: skip
    ax.axvline(capacity.rate, color=style.colour("ideal"), linewidth=1, linestyle=":")
    label = f"capacity {capacity.rate:.3g} a second"
    ax.text(capacity.rate, 0.02, f"{label} ", ha="right", va="bottom", size=10, transform=ax.get_xaxis_transform())
    ax.set_xlim(left=0)
    style.label_axis(ax, "x", "requests a second")
    what = f"{objective.latency} p{100 * objective.share:g}, modelled"
    style.label_axis(ax, "y", what, kind="seconds", log=10)
    ax.legend(loc="upper left", bbox_to_anchor=(0, 0.97))
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
