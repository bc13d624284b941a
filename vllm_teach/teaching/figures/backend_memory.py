"""The extra memory of each backend for the same sizes under two masks: one argument more can cost the whole matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_STRENGTHS = (1.0, 0.5)


@dataclass(frozen=True)
class BackendMemory:
    """Peak bytes by call and backend: `peak[call][backend]`."""

    peak: dict[str, dict[str, int]]

    def ratio(self, name: str, call: str, other_call: str) -> float:
        """How many times more a backend needs for `call` than for `other_call`."""
        return self.peak[call][name] / self.peak[other_call][name]

    def over(self, name: str, other: str, call: str) -> float:
        """How many times more `name` needs than `other` for one call."""
        return self.peak[call][name] / self.peak[call][other]


def draw_backend_memory(peak: Mapping[str, Mapping[str, int]], title: str) -> tuple[Figure, BackendMemory]:
    """Draw a pair of bars per backend, one for each of two calls; the axis is linear.

    Raises InvalidArgumentError unless there are two calls with the same backends.
    """
    data = BackendMemory({call: dict(sizes) for call, sizes in peak.items()})
    if len(data.peak) != 2 or len({tuple(sizes) for sizes in data.peak.values()}) != 1:
        raise InvalidArgumentError(f"peak has the calls {list(peak)}: give two, with the same backends in one order.")
    names = list(next(iter(data.peak.values())))
    figure, ax = plt.subplots(figsize=(8.4, 0.75 * len(names) + 1.2))
    top = max(max(sizes.values()) for sizes in data.peak.values())
    for part, (call, sizes) in enumerate(data.peak.items()):
        for row, name in enumerate(names):
            fill = style.tint(style.colour(name), _STRENGTHS[part])
            place = row + (part - 0.5) * 0.4
            ax.barh(place, sizes[name], height=0.36, color=fill)
            ax.text(sizes[name] + 0.01 * top, place, f"{call}: {style.format_bytes(sizes[name])}", va="center", size=10)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.45, -0.55)
    step = 1 << max(int(top).bit_length() - 2, 0)
    style.label_axis(ax, "x", "peak extra memory", kind="bytes", ticks=range(0, int(top) + 1, step))
    ax.set_xlim(0, 1.3 * top)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_title(title)
    return figure, data
