"""Registers of a thread against the threads that a multiprocessor holds: a staircase, with kernels on it."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.performance.multiprocessor import MULTIPROCESSORS, Residency, resident_threads
from vllm_teach.teaching import style


@dataclass(frozen=True)
class ResidentThreads:
    """`stairs` are (registers of a thread, threads that fit); `kernels` maps a name to (registers, Residency)."""

    arch: str
    stairs: tuple[tuple[int, int], ...]
    kernels: dict[str, tuple[int, Residency]]


def residency_stairs(
    kernels: Mapping[str, tuple[int, int]], *, block_threads: int = 256, arch: str = "sm_80", most: int = 80
) -> ResidentThreads:
    """Return the stairs for blocks of `block_threads`, and where the `kernels` (registers, shared bytes) stand."""
    counts = range(16, most + 1)
    return ResidentThreads(
        arch,
        tuple((count, resident_threads(count, block_threads, arch=arch).threads) for count in counts),
        {
            name: (count, resident_threads(count, block_threads, shared, arch))
            for name, (count, shared) in kernels.items()
        },
    )


def draw_resident_threads(ax: Axes, data: ResidentThreads, concepts: Mapping[str, str]) -> ResidentThreads:
    """Draw the stairs on `ax` and each kernel as a point in the colour of its concept. Returns `data`."""
    has = MULTIPROCESSORS[data.arch]
    ax.step(*zip(*data.stairs, strict=True), where="mid", color=style.colour("baseline"), label="fits")
    for name, (registers, residency) in data.kernels.items():
        colour = style.colour(concepts[name])
        ax.plot(registers, residency.threads, "o", color=colour, markersize=9, zorder=3, label=f"{name}: {registers}")
    ax.axhline(has.threads, color=style.colour("limit"), linewidth=1.2, linestyle="--")
    ax.text(80, has.threads + 45, f"all that an {has.name}'s multiprocessor has", ha="right", size=10,
            color=style.colour("limit"))  # fmt: skip
    ax.set(ylim=(0, 1.16 * has.threads))
    style.label_axis(ax, "x", "registers of a thread")
    style.label_axis(ax, "y", "threads at once", kind="tokens")
    ax.legend(loc="lower left")
    return data
