"""Little's law on a published table: requests a second times seconds each is how many are in flight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from vllm_teach.teaching import style

_COLOURS = ("naive", "tiled", "paged")


@dataclass(frozen=True)
class Point:
    """A system: requests a second, seconds of a request, and their product, the mean number in flight."""

    rate: float
    seconds: float

    @property
    def in_flight(self) -> float:
        """Requests in flight, if `seconds` is their mean."""
        return self.rate * self.seconds


def draw_in_flight_lines(points: Mapping[str, Point], levels: tuple[float, ...], *, title: str) -> Figure:
    """Draw each system over both axes, logarithmic, and a line of equal requests in flight for each of `levels`."""
    figure, ax = plt.subplots(figsize=(7.0, 3.9))
    rates = [point.rate for point in points.values()]
    ends = min(rates) / 2, max(rates) * 2
    for level in levels:
        ax.plot(ends, [level / rate for rate in ends], color=style.colour("baseline"), linewidth=1, linestyle="--")
        rate = ends[0] * 1.06
        ax.text(
            rate, 1.06 * level / rate, f"{level:g} in flight", va="bottom", size=9.5, color=style.QUIET_INK,
            rotation=math.degrees(math.atan(-level / rate**2)), rotation_mode="anchor", transform_rotates_text=True,
        )  # fmt: skip
    for (name, point), concept in zip(points.items(), _COLOURS, strict=False):
        ax.plot([point.rate], [point.seconds], "o", markersize=10, color=style.colour(concept))
        ax.annotate(
            f"{name}: {point.in_flight:.1f}", (point.rate, point.seconds), xytext=(9, 7), textcoords="offset points",
            size=10, bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends)
    style.label_axis(ax, "x", "requests a second", unit="log scale", ticks=[10, 20, 50, 100])
    style.label_axis(ax, "y", "P99", unit="s, log scale", ticks=[0.05, 0.1, 0.2, 0.5, 1])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    ax.set_title(title)
    return figure
