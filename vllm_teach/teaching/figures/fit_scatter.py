"""Measured steps against what a fitted model says of them: those it was fitted to, and those it has never seen."""

import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.performance.cost_model.fit import Residual
from vllm_teach.teaching import style

BAND = 0.15


def median_error(points: Sequence[Residual]) -> float:
    """Return the median of the points' errors without their signs, as a share of what was measured."""
    return statistics.median(abs(each.error) for each in points)


def share_within(points: Sequence[Residual], band: float = BAND) -> float:
    """Return the share of points, 0 to 1, whose error is at most `band`."""
    return sum(abs(each.error) <= band for each in points) / len(points)


def draw_fit_scatter(fitted: Sequence[Residual], unseen: Sequence[Residual], *, title: str) -> Figure:
    """Draw both kinds of points on logarithmic axes, with the line on which the model is right and BAND around it."""
    figure, ax = plt.subplots(figsize=(5.6, 4.6))
    every = [value for each in (*fitted, *unseen) for value in (each.seconds, each.modelled)]
    ends = [min(every) / 1.5, max(every) * 1.5]
    ax.fill_between(
        ends,
        [(1 - BAND) * end for end in ends],
        [(1 + BAND) * end for end in ends],
        color=style.colour("saved"),
        label=f"within {BAND:.0%}",
    )
    ax.plot(ends, ends, color=style.colour("ideal"), linewidth=1)
    for points, name, concept, marker in (
        (fitted, "fitted to", "baseline", "o"),
        (unseen, "never seen", "measured", "D"),
    ):
        x, y = [each.seconds for each in points], [each.modelled for each in points]
        ax.plot(x, y, marker, color=style.colour(concept), label=name)
    ax.set(xlim=ends, ylim=ends)
    style.label_axis(ax, "x", "measured", kind="seconds", log=10)
    style.label_axis(ax, "y", "modelled", kind="seconds", log=10)
    ax.legend(loc="upper left")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
