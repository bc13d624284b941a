"""Seconds of each backend as a call grows in one size, with a ring around the fastest at each: no line stays lowest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

MARKERS = {
    "naive": "o",
    "tiled": "s",
    "memory_efficient": "D",
    "sdpa": "^",
    "flex": "P",
    "cpu": "v",
    "triton": "X",
    "flash_attn": "p",
    "xformers": "h",
}


@dataclass(frozen=True)
class BackendTimes:
    """Seconds by backend and size; a backend need not have been timed at every size."""

    sizes: tuple[int, ...]
    seconds: dict[str, dict[int, float]]

    def at(self, size: int) -> dict[str, float]:
        """The seconds of all that were timed at `size`, the fastest first."""
        found = {name: times[size] for name, times in self.seconds.items() if size in times}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def fastest(self, size: int) -> str:
        """The name of the fastest at `size`."""
        return next(iter(self.at(size)))

    def spread(self, size: int) -> float:
        """How many times longer than the fastest the slowest takes at `size`."""
        times = list(self.at(size).values())
        return times[-1] / times[0]


def backend_times(timed: Mapping[int, Mapping[str, float]]) -> BackendTimes:
    """Collect `timed[size][backend]`, in seconds. Raises InvalidArgumentError when a size has no time at all."""
    for size, times in timed.items():
        if not times:
            raise InvalidArgumentError(f"timed[{size}] is empty: time at least one backend at each size.")
    names = dict.fromkeys(name for times in timed.values() for name in times)
    seconds = {name: {size: times[name] for size, times in timed.items() if name in times} for name in names}
    return BackendTimes(tuple(timed), seconds)


def draw_backend_times(ax: Axes, data: BackendTimes, what: str, unit: str, ticks: Sequence[int] | None = None) -> None:
    """Draw a line per backend, both axes logarithmic, and a ring around the fastest at each size; changes `ax`.

    `what` and `unit` label the x axis ("keys, one sequence", "tokens").
    """
    for name, times in data.seconds.items():
        ink, mark = style.colour(name), f"{MARKERS[name]}-"
        ax.plot(list(times), list(times.values()), mark, color=ink, linewidth=1.7, markersize=5.5, label=name, zorder=3)
    rings = [(size, next(iter(data.at(size).values()))) for size in data.sizes]
    ax.plot(*zip(*rings, strict=True), "o", markersize=13, fillstyle="none", color=style.INK, label="fastest", zorder=4)
    style.label_axis(ax, "x", what, unit=unit, kind="tokens", log=2, ticks=ticks or data.sizes)
    style.label_axis(ax, "y", "time per call", kind="seconds", log=10)
