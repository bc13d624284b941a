"""The free blocks of a buddy allocator, to scale: a row for each length of run, from the longest to single blocks."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.kvcache.buddy import BuddyAllocator
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_WIDE, _LEFT, _TALL = 7.0, 1.15, 0.34


@dataclass(frozen=True)
class Buddy:
    """The run of 2^`order` blocks from `start` on: "free" as a whole, "split" into its halves, or "taken" as a whole.

    Parts of what is taken, and halves of what is free, are not told apart.
    """

    order: int
    start: int
    state: str

    @property
    def length(self) -> int:
        """Its blocks."""
        return 1 << self.order


@dataclass(frozen=True)
class BuddyView:
    """All runs that can be told apart, the longest first, and the figures that a request for a run depends on."""

    num_blocks: int
    runs: tuple[Buddy, ...]
    num_free: int
    largest_free_run: int

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the share of the free blocks that are outside the longest free run; 0 if none is."""
        return 1 - self.largest_free_run / self.num_free if self.num_free else 0.0


def view_buddies(allocator: BuddyAllocator) -> BuddyView:
    """Look at an allocator: how its blocks are split at this moment."""
    free = set(allocator.free_runs())
    runs: list[Buddy] = []

    def look(start: int, order: int) -> None:
        length = 1 << order
        if (start, length) in free:
            runs.append(Buddy(order, start, "free"))
        elif any(start <= begin < start + length for begin, _ in free):
            runs.append(Buddy(order, start, "split"))
            look(start, order - 1)
            look(start + length // 2, order - 1)
        else:
            runs.append(Buddy(order, start, "taken"))

    start = 0
    for order in reversed(range(allocator.num_blocks.bit_length())):
        if allocator.num_blocks >> order & 1:
            look(start, order)
            start += 1 << order
    runs.sort(key=lambda run: (-run.order, run.start))
    return BuddyView(allocator.num_blocks, tuple(runs), len(allocator), allocator.largest_free_run)


def draw_buddies(view: BuddyView, title: str | None = None) -> Figure:
    """Draw a row for each order, free runs in colour, and below it the blocks themselves."""
    orders = max(run.order for run in view.runs)
    height = 0.55 + (orders + 2) * (_TALL + 0.08) + 0.4
    counted = f"{view.num_free} of {view.num_blocks} blocks are free, but the longest run has {view.largest_free_run}"
    figure, axes = page(_LEFT + _WIDE + 0.25, height, title or counted)
    unit = _WIDE / view.num_blocks
    for order in range(orders + 1):
        y = 0.55 + (order + 1) * (_TALL + 0.08)
        blocks = "block" if order == 0 else "blocks"
        axes.text(_LEFT - 0.12, y + _TALL / 2, f"{1 << order} {blocks}", ha="right", va="center", size=10)
    free: set[int] = set()
    for run in view.runs:
        _draw_run(axes, run, unit)
        if run.state == "free":
            free.update(range(run.start, run.start + run.length))
    axes.text(_LEFT - 0.12, 0.47 + _TALL / 2, "memory", ha="right", va="center", size=10, weight="bold")
    for block in range(view.num_blocks):
        _box(axes, block, 1, 0.47, unit, "free" if block in free else "taken")
    every = -(-view.num_blocks // 16)
    for block in range(0, view.num_blocks, every):
        axes.text(_LEFT + (block + 0.5) * unit, 0.42, f"{block}", ha="center", va="top", size=9)
    said = "physical block (blue: free, grey: taken, dashed: split in two)"
    axes.text(_LEFT + _WIDE / 2, 0.06, said, ha="center", va="bottom", size=9.5)
    return figure


def _draw_run(axes: Axes, run: Buddy, unit: float) -> None:
    y = 0.55 + (run.order + 1) * (_TALL + 0.08)
    _box(axes, run.start, run.length, y, unit, run.state)
    if run.state == "free" and run.length * unit > 0.3:
        middle = _LEFT + (run.start + run.length / 2) * unit
        axes.text(middle, y + _TALL / 2, "free", ha="center", va="center", size=9, zorder=3)


_FILLS = {"free": style.colour("done"), "split": style.PAPER, "taken": style.colour("skipped")}


def _box(axes: Axes, start: int, length: int, y: float, unit: float, state: str) -> None:
    axes.add_patch(
        Rectangle(
            (_LEFT + start * unit, y),
            length * unit,
            _TALL,
            facecolor=_FILLS[state],
            edgecolor=style.INK,
            linewidth=0.8,
            linestyle="--" if state == "split" else "-",
            gid=f"{state} {start} {length}",
            zorder=2,
        )
    )
