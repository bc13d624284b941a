"""The memory of one training step as it rises and falls: every allocation and release, forward and backward."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import MemoryTrace
from vllm_teach.teaching import style

REGIONS = ("forward", "backward")


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each event. `place` runs from 0 to 1 in the forward pass and from 1 to 2 in the backward.

    `kept` is what was alive between the two, `peak` the most at any moment.
    """

    place: tuple[float, ...]
    live: tuple[int, ...]
    kept: int
    peak: int


def timeline(trace: MemoryTrace) -> Timeline:
    """Read a trace whose code marked the regions "forward" and "backward"; InvalidArgumentError without either.

    What is released as the forward region ends counts to the forward pass.
    """
    regions = [step.region for step in trace.steps]
    if not set(REGIONS) <= set(regions):
        raise InvalidArgumentError('trace has no regions "forward" and "backward": mark both with region(...).')
    split = regions.index("backward")
    counts = split, len(regions) - split
    place = [(i + 1) / counts[0] for i in range(counts[0])] + [1 + (i + 1) / counts[1] for i in range(counts[1])]
    live = tuple(step.live for step in trace.steps)
    return Timeline((0.0, *place), (0, *live), live[split - 1], trace.peak)


def draw_timelines(ax: Axes, traces: Mapping[str, MemoryTrace]) -> dict[str, Timeline]:
    """Draw the bytes alive through forward and backward, a line per implementation; changes `ax`, returns the data."""
    data = {name: timeline(trace) for name, trace in traces.items()}
    top = max(one.peak for one in data.values())
    for name, one in data.items():
        colour = style.colour(name)
        ax.plot(one.place, one.live, color=colour, drawstyle="steps-post", label=f"{name}: peak", zorder=3)
        ax.fill_between(one.place, one.live, step="post", color=colour, alpha=0.15, linewidth=0, zorder=2)
        ax.plot([0.86, 1.14], [one.kept] * 2, color=colour, linewidth=5, solid_capstyle="butt", zorder=4)
    ax.axvline(1, color=style.INK, linewidth=1, linestyle=(0, (2, 2)))
    ax.set(xlim=(0, 2), ylim=(0, 1.15 * top))
    ax.set_xticks([0.5, 1, 1.5], ["forward pass", "loss", "backward pass"])
    ax.tick_params(axis="x", length=0)
    style.label_axis(ax, "y", "memory alive", kind="bytes", ticks=_ticks(top))
    ax.set_xlabel("allocations and releases, in their order (not to scale in time)")
    handles = [
        ax.plot([], [], color=style.colour(name), linewidth=5, label=f"{name}: {style.format_bytes(one.kept)}")[0]
        for name, one in data.items()
    ]
    ax.legend(handles=handles, loc="upper left", title="kept for the backward pass", alignment="left")
    return data


def _ticks(top: int) -> list[int]:
    """Three to six round numbers of bytes up to `top`."""
    step = 1 << max(top.bit_length() - 3, 0)
    return list(range(0, top + 1, step))
