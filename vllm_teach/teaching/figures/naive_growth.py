"""Time and peak memory of naive attention against the sequence length, with the square law drawn through them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import log_log_slope
from vllm_teach.teaching import style


@dataclass(frozen=True)
class GrowthData:
    """Log-log slopes over the larger half of the sizes, and the factors c of the fits c x n^2 over all sizes."""

    seconds_slope: float
    bytes_slope: float
    seconds_factor: float
    bytes_factor: float


def square_fit(costs: Mapping[int, float]) -> tuple[float, float]:
    """Return (slope, factor): the log-log slope over the larger half of the sizes, and c of the best c x n^2 over all.

    Small sizes measure fixed overheads, so they are kept out of the slope. The fit minimises squared errors of the
    logarithms: c is the geometric mean of cost / n^2. Raises InvalidArgumentError for fewer than four sizes.
    """
    if len(costs) < 4:
        raise InvalidArgumentError(f"costs has {len(costs)} sizes: a fit needs at least four.")
    large = sorted(costs)[len(costs) // 2 :]
    slope = log_log_slope(large, [costs[n] for n in large])
    return slope, exp(sum(log(cost / n**2) for n, cost in costs.items()) / len(costs))


def draw_growth(seconds: Mapping[int, float], peak_bytes: Mapping[int, float]) -> tuple[Figure, GrowthData]:
    """Draw seconds and bytes per sequence length, both measured, each with its fit c x n^2; returns figure and data."""
    (time_slope, time_factor), (bytes_slope, bytes_factor) = square_fit(seconds), square_fit(peak_bytes)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.9))
    _panel(left, seconds, time_factor, "time of one call", "seconds")
    _panel(right, peak_bytes, bytes_factor, "peak memory of one call", "bytes")
    figure.suptitle(
        "Naive attention: for long texts, twice the tokens cost four times or more",
        x=0.01,
        ha="left",
        fontsize=12,
        weight="bold",
    )
    return figure, GrowthData(time_slope, bytes_slope, time_factor, bytes_factor)


def _panel(ax: Axes, costs: Mapping[int, float], factor: float, what: str, kind: style.Kind) -> None:
    sizes = sorted(costs)
    ax.plot(
        sizes, [factor * n**2 for n in sizes], "--", color=style.colour("baseline"), label="baseline: c · n²", zorder=2
    )
    ax.plot(sizes, [costs[n] for n in sizes], "o", color=style.colour("naive"), label="naive, measured", zorder=3)
    style.label_axis(ax, "x", "sequence length n", unit="tokens", log=2, kind="tokens", ticks=sizes[1::2])
    style.label_axis(ax, "y", what, log=10 if kind == "seconds" else 2, kind=kind)
    last = sizes[-1]
    text = style.format_seconds(costs[last]) if kind == "seconds" else style.format_bytes(costs[last])
    ax.annotate(text, (last, costs[last]), (-8, 2), textcoords="offset points", ha="right", va="bottom", size=10)
    ax.legend(loc="lower right")
