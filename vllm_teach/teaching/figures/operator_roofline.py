"""A decode step's operators on the roof of a device: how batch and context move them, and whose time it is."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.performance.cost_model.operators import Operators
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.hardware import HardwareSpec
from vllm_teach.performance.roofline import attainable
from vllm_teach.teaching import style

# Each part's operators, and the concept that gives its colour. What moves bytes and multiplies nothing is the rest.
_PARTS = {
    "matrix products": (("linear layers", "logits"), "linear"),
    "attention": (("decode attention",), "attention"),
}
_REST = "all else"


@dataclass(frozen=True)
class RoofPart:
    """A part of the step: its FLOPs and bytes, and the seconds that they take at the device's ceilings."""

    name: str
    flops: float
    num_bytes: float
    seconds: float
    concept: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class DecodeOnRoof:
    """A step in which `batch` sequences decode, each seeing `context` keys: its parts, the most seconds first to last.

    `peak` in FLOP/s and `bandwidth` in bytes/s are the ceilings, `ridge` the FLOPs per byte at which they meet.
    """

    batch: int
    context: int
    peak: float
    bandwidth: float
    parts: tuple[RoofPart, ...]

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.peak / self.bandwidth

    @property
    def seconds(self) -> float:
        """The least seconds of the step: no operator hides behind another."""
        return sum(part.seconds for part in self.parts)

    def part(self, name: str) -> RoofPart:
        """Return the part called `name`. Raises KeyError when there is none."""
        return {part.name: part for part in self.parts}[name]

    def limit_of(self, name: str) -> str:
        """Return "memory" or "arithmetic", whichever bounds the part."""
        return "memory" if self.part(name).intensity < self.ridge else "arithmetic"


def decode_on_roof(
    operators: Operators, hardware: HardwareSpec, batch: int, context: int, dtype: str = "bfloat16"
) -> DecodeOnRoof:
    """Count a decode step of `batch` sequences, `context` keys each, and put its parts on the roof of `hardware`."""
    peak, bandwidth = hardware.peak_of(dtype), hardware.memory_bandwidth
    keys = batch * context
    seen = keys if operators.config.sliding_window is None else batch * min(context, operators.config.sliding_window)
    works = operators.work(StepShape(batch, batch, batch, batch, keys, seen))
    parts = []
    for name, (kinds, concept) in _PARTS.items():
        flops, moved = (sum(works[kind][i] for kind in kinds) for i in (0, 1))
        parts.append(RoofPart(name, flops, moved, flops / attainable(flops / moved, peak, bandwidth), concept))
    taken = {kind for kinds, _ in _PARTS.values() for kind in kinds}
    moved = sum(work.num_bytes for kind, work in works.items() if kind not in taken)
    parts.append(RoofPart(_REST, 0.0, moved, moved / bandwidth, "other"))
    return DecodeOnRoof(batch, context, peak, bandwidth, tuple(parts))


def draw_decode_on_roof(data: DecodeOnRoof, *, title: str, span: tuple[float, float] = (0.25, 2048)) -> Figure:
    """Draw the parts on the roof, and below it the step's time by part; `span` is the axis of FLOPs per byte."""
    figure, (roof, bar) = plt.subplots(2, 1, figsize=(7.0, 4.6), height_ratios=(5, 1))
    _draw_roof(roof, data, span)
    start = 0.0
    for part in data.parts:
        width = 1e3 * part.seconds
        bar.barh(0, width, left=start, color=style.colour(part.concept), label=part.name)
        start += width
    bar.set(xlim=(0, start), yticks=[])
    bar.grid(False)
    bar.legend(loc="upper center", bbox_to_anchor=(0.5, 1.85), ncols=3)
    style.label_axis(bar, "x", "least time of the step", unit="ms, modelled")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure


def _draw_roof(ax: Axes, data: DecodeOnRoof, span: tuple[float, float]) -> None:
    low, high = span
    edge = style.colour("limit")
    ends = [low, data.ridge, high]
    ax.plot(ends, [attainable(x, data.peak, data.bandwidth) for x in ends], color=edge, zorder=2)
    ax.axvline(data.ridge, color=edge, linewidth=1, linestyle=":", zorder=1)
    for part in data.parts:
        if part.flops:
            rate = attainable(part.intensity, data.peak, data.bandwidth)
            ax.plot(part.intensity, rate, "o", color=style.colour(part.concept), markersize=11, zorder=3)
    ax.set(xlim=span, ylim=(data.bandwidth * low / 1.5, data.peak * 4))
    style.label_axis(ax, "x", "arithmetic intensity", unit="FLOP per byte", log=2)
    style.label_axis(ax, "y", "rate", unit="FLOP/s", log=10, kind="count")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    flat = f"arithmetic, {style.format_count(data.peak)}FLOP/s"
    ax.text(high / 1.1, data.peak * 1.25, flat, ha="right", va="bottom", size=10, color=edge)
    slope = f"memory, {style.format_count(data.bandwidth)}B/s"
    beside = data.bandwidth * low * (high / low) ** 0.32  # above the slope where the text ends
    ax.text(low * 1.2, beside, slope, ha="left", va="bottom", size=10, color=edge)
    ax.text(data.ridge * 1.1, data.bandwidth * low, f"ridge {data.ridge:.3g}", va="bottom", size=10, color=edge)
