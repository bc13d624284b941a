"""The roofline of a machine with the measured computations under it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from vllm_teach.performance.machine import Machine
from vllm_teach.performance.roofline import Point, attainable
from vllm_teach.teaching import style


@dataclass(frozen=True)
class RooflineData:
    """What the figure shows: ceilings (FLOP/s, bytes/s), the ridge (FLOP per byte), the points their part of the roof.

    `limited_by` says for each point's name whether "memory" or "arithmetic" bounds it.
    """

    peak: float
    bandwidth: float
    ridge: float
    points: tuple[Point, ...]
    share_of_roof: dict[str, float]
    limited_by: dict[str, str]


def roofline_data(machine: Machine, points: Sequence[Point], dtype: str = "float32") -> RooflineData:
    """Set points beside the roof that `machine` attained in `dtype`; InvalidArgumentError for an unmeasured dtype."""
    peak, bandwidth = machine.rate(dtype).median, machine.read_bandwidth.median
    ridge = peak / bandwidth
    return RooflineData(
        peak=peak,
        bandwidth=bandwidth,
        ridge=ridge,
        points=tuple(points),
        share_of_roof={p.name: p.flops_per_second / attainable(p.intensity, peak, bandwidth) for p in points},
        limited_by={p.name: "memory" if p.intensity < ridge else "arithmetic" for p in points},
    )


def draw_roofline(ax: Axes, machine: Machine, points: Sequence[Point], dtype: str = "float32") -> RooflineData:
    """Draw the roof of `machine` in `dtype` on `ax`, both axes logarithmic, with `points` under it; returns the data.

    A thin line goes from each point up to the roof: its length is the speed left unused.
    """
    data = roofline_data(machine, points, dtype)
    intensities = [p.intensity for p in points]
    low = min([data.ridge / 16, *(i / 2 for i in intensities)])
    high = max([data.ridge * 16, *(i * 2 for i in intensities)])
    x = np.array([low, data.ridge, high])
    ax.plot(x, [attainable(i, data.peak, data.bandwidth) for i in x], color=style.colour("limit"), zorder=2)
    ax.plot([data.ridge] * 2, [0, data.peak], color=style.colour("limit"), linewidth=1, linestyle=":", zorder=1)
    for point in points:
        roof = attainable(point.intensity, data.peak, data.bandwidth)
        colour = style.colour(point.concept)
        ax.plot([point.intensity] * 2, [point.flops_per_second, roof], color=colour, linewidth=1, zorder=2)
        ax.plot(point.intensity, point.flops_per_second, "o", color=colour, markersize=8, label=point.name, zorder=3)
    rates = [data.bandwidth * low, *(p.flops_per_second for p in points)]
    ax.set(xlim=(low, high), ylim=(min(rates) / 2, data.peak * 3))
    style.label_axis(ax, "x", "arithmetic intensity", unit="FLOP per byte moved", log=2)
    style.label_axis(ax, "y", "rate", unit="FLOP/s", log=10, kind="count")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    _name_the_roof(ax, data, low, high, dtype)
    if points:
        ax.legend(loc="lower right")
    return data


def _name_the_roof(ax: Axes, data: RooflineData, low: float, high: float, dtype: str) -> None:
    ink = style.colour("limit")
    flat = f"{dtype} arithmetic: {style.format_count(data.peak)}FLOP/s"
    ax.text(high / 1.1, data.peak * 1.12, flat, ha="right", va="bottom", size=10, color=ink)
    middle = (low * data.ridge) ** 0.5
    ax.text(
        middle,
        data.bandwidth * middle * 1.25,
        f"memory: {style.format_count(data.bandwidth)}B/s",
        ha="center",
        va="bottom",
        size=10,
        color=ink,
        rotation=_angle(ax, low, data),
        rotation_mode="anchor",
    )


def _angle(ax: Axes, low: float, data: RooflineData) -> float:
    """The slope of the memory roof on the page, degrees. It depends on the layout, so the figure is laid out first."""
    figure = ax.get_figure(root=True)
    assert figure is not None  # only a removed Axes has none
    figure.draw_without_rendering()
    start, end = ax.transData.transform([(low, data.bandwidth * low), (data.ridge, data.peak)])
    return float(np.degrees(np.arctan2(end[1] - start[1], end[0] - start[0])))
