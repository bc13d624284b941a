"""The sum over a warp as it is computed: each thread adds the number of a partner, at half the distance each time."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_ROW = 1.5  # from one line of numbers to the next, in widths of a thread's column
_BOX_W, _BOX_H = 0.72, 0.56


@dataclass(frozen=True)
class WarpSum:
    """`rows[0]` are the threads' numbers, `rows[i + 1]` those after the exchange at `distances[i]`."""

    distances: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]

    @property
    def total(self) -> float:
        """What every thread holds in the end."""
        return self.rows[-1][0]


def warp_sum(values: Sequence[float]) -> WarpSum:
    """Return the exchanges of a butterfly: thread i adds the number of thread i ^ distance.

    Raises InvalidArgumentError for a number of threads that is no power of two.
    """
    threads = len(values)
    if threads < 2 or threads & (threads - 1):
        raise InvalidArgumentError(f"values has {threads} numbers; give a power of two, 2 or more.")
    rows, distances = [tuple(values)], []
    distance = threads // 2
    while distance:
        before = rows[-1]
        rows.append(tuple(before[i] + before[i ^ distance] for i in range(threads)))
        distances.append(distance)
        distance //= 2
    return WarpSum(tuple(distances), tuple(rows))


def draw_warp_sum(ax: Axes, data: WarpSum) -> WarpSum:
    """Draw the numbers of all threads, line under line, with an arrow from each number to the thread that adds it.

    Thread 0's sum is coloured all the way up: which numbers are in it after each exchange. Returns `data`.
    """
    threads = len(data.rows[0])
    for level, row in enumerate(data.rows):
        inside = _in_sum_of_thread_0(data, level)
        for i, value in enumerate(row):
            x, y = float(i), -level * _ROW
            fill = style.colour("current") if i == 0 else style.colour("done") if i in inside else "#FFFFFF"
            box = (x - _BOX_W / 2, y - _BOX_H / 2)
            ax.add_patch(Rectangle(box, _BOX_W, _BOX_H, facecolor=fill, edgecolor=style.INK, linewidth=1, zorder=3))
            ax.text(x, y, f"{value:g}", ha="center", va="center", size=11, zorder=4)
            if level < len(data.distances):
                _draw_arrows(ax, i, i ^ data.distances[level], y)
    labels = ["a number each", *(f"distance {distance}" for distance in data.distances)]
    for level, text in enumerate(labels):
        ax.text(-0.75, -level * _ROW, text, ha="right", va="center", size=10)
    for i in range(threads):
        ax.text(i, 0.62, f"thread {i}", ha="center", va="center", size=9, color=style.QUIET_INK)
    ax.set(xlim=(-2.7, threads - 0.4), ylim=(-(len(data.rows) - 1) * _ROW - 0.6, 1.0))
    ax.set_axis_off()
    return data


def _in_sum_of_thread_0(data: WarpSum, level: int) -> set[int]:
    """The threads whose numbers at `level` end up in thread 0's sum, each of them once."""
    inside = {0}
    for distance in data.distances[level:]:
        inside |= {i ^ distance for i in inside}
    return inside


def _draw_arrows(ax: Axes, i: int, partner: int, y: float) -> None:
    top, bottom = y - _BOX_H / 2, y - _ROW + _BOX_H / 2
    look = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    for target, colour, width in ((i, "#9A9A9A", 0.9), (partner, style.colour("tiled"), 1.1)):
        arrow = look | {"color": colour, "linewidth": width}
        ax.annotate("", xy=(target, bottom), xytext=(i, top), arrowprops=arrow, zorder=2)
