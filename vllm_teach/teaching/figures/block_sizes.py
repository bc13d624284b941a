"""How the block size divides the cost of paging: slots held in vain against blocks to keep book of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.occupancy import PagedMemory, simulate_occupancy
from vllm_teach.kvcache.waste import Lengths
from vllm_teach.teaching import style


@dataclass(frozen=True)
class BlockSizePoint:
    """A cache with blocks of `block_size` tokens while requests waited: tokens stored / slots held, sequences in it.

    `blocks_per_sequence` are the entries of a sequence's block table at its end, the mean over the requests.
    """

    block_size: int
    utilization: float
    in_flight: float
    blocks_per_sequence: float


def sweep_block_sizes(lengths: Lengths, num_slots: int, block_sizes: Iterable[int]) -> list[BlockSizePoint]:
    """Run `lengths` through a paged cache of `num_slots` (or less, whole blocks) once for each block size."""
    points = []
    for size in block_sizes:
        result = simulate_occupancy(lengths, PagedMemory(num_slots, size))
        entries = sum(-(-(prompt + output) // size) for prompt, output in lengths) / len(lengths)
        points.append(BlockSizePoint(size, result.mean_utilization, result.mean_in_flight, entries))
    return points


def draw_block_sizes(points: Sequence[BlockSizePoint], marks: Mapping[int, str] | None = None) -> Figure:
    """Draw the waste and the sequences in flight, and the blocks of a sequence, over the block size.

    `marks` names block sizes with a vertical line. Returns the figure. Raises InvalidArgumentError without a point.
    """
    if not points:
        raise InvalidArgumentError("points is empty: sweep at least one block size.")
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.7))
    sizes = [point.block_size for point in points]
    paged = {"color": style.colour("paged"), "marker": "o"}
    for ax, values, title, label in (
        (axes[0], [100 * (1 - point.utilization) for point in points], "Large blocks waste slots", "empty slots"),
        (axes[1], [point.blocks_per_sequence for point in points], "Small blocks are many", "blocks of a sequence"),
    ):
        ax.plot(sizes, values, **paged)
        ax.set_ylim(0, 1.12 * max(values))
        ax.set_title(title)
        style.label_axis(ax, "x", "block size", unit="tokens", log=2, ticks=sizes)
        ax.set_xticklabels([f"{size}" for size in sizes])
        style.label_axis(ax, "y", label, unit="% of those held" if ax is axes[0] else "mean")
        for size, name in (marks or {}).items():
            ax.axvline(size, color=style.colour("baseline"), linestyle=":", linewidth=1.4)
            ax.text(size * 1.08, 1.09 * max(values), name, va="top", color=style.QUIET_INK, fontsize=9.5)
    return figure
