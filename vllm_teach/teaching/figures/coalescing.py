"""One load of a warp: which bytes its 32 threads ask for, and which sectors of 32 bytes memory sends for it."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

THREADS = 32
SECTOR = 32  # bytes: what memory sends at least
_LINE = 256  # bytes drawn beside each other


@dataclass(frozen=True)
class WarpLoad:
    """Thread t loads `width` bytes from byte t * `stride` on. `sectors` are the sectors touched, in order."""

    width: int
    stride: int
    sectors: tuple[int, ...]

    @property
    def asked_for(self) -> int:
        """Bytes that the threads want."""
        return THREADS * self.width

    @property
    def sent(self) -> int:
        """Bytes that memory sends: whole sectors."""
        return len(self.sectors) * SECTOR

    @property
    def used(self) -> float:
        """The share of what is sent that somebody asked for."""
        return self.asked_for / self.sent

    def describe(self) -> str:
        """The counts in one line."""
        return (
            f"{self.asked_for} bytes asked for, {len(self.sectors)} sectors = {self.sent:,} bytes sent, "
            f"{self.used:.0%} of them used"
        )


def warp_load(width: int, stride: int) -> WarpLoad:
    """Return what one load of a warp moves, `width` and `stride` in bytes.

    Raises InvalidArgumentError for threads that would load over each other, or not at a multiple of the width.
    """
    if width < 1 or stride < width or stride % width:
        raise InvalidArgumentError(f"stride is {stride} and width {width}; give a multiple of the width.")
    touched = {byte // SECTOR for t in range(THREADS) for byte in range(t * stride, t * stride + width)}
    return WarpLoad(width, stride, tuple(sorted(touched)))


def draw_warp_load(data: WarpLoad, lines: int = 4) -> Figure:
    """Draw the first `lines` x 256 bytes of memory, a cell for each two bytes, by what happens to them."""
    figure, ax = plt.subplots(figsize=(8.4, 0.52 * lines + 1.5))
    cells: dict[str, list[Rectangle]] = {"asked for": [], "sent in vain": [], "stays": []}
    wanted = {byte for t in range(THREADS) for byte in range(t * data.stride, t * data.stride + data.width)}
    shown = lines * _LINE
    for byte in range(0, shown, 2):
        line, column = divmod(byte, _LINE)
        kind = "asked for" if byte in wanted else "sent in vain" if byte // SECTOR in data.sectors else "stays"
        cells[kind].append(Rectangle((column, line + 0.12), 2, 0.76))
    fills = {
        "asked for": style.colour("tiled"),
        "sent in vain": style.colour("naive"),
        "stays": style.colour("pending"),
    }
    for kind, rectangles in cells.items():
        ax.add_collection(PatchCollection(rectangles, facecolor=fills[kind], edgecolor="none", linewidth=0))
    _draw_sectors(ax, data, lines)
    beyond = data.sectors[-1] * SECTOR >= shown
    ax.set_title(_title(data))
    ax.set(xlim=(0, _LINE), ylim=(lines, 0))
    ax.set_yticks([line + 0.5 for line in range(lines)], [f"{line * _LINE:,}" for line in range(lines)])
    style.label_axis(ax, "x", "bytes behind the first of the line", ticks=range(0, _LINE + 1, SECTOR))
    ax.set_ylabel("line begins at byte")
    ax.grid(visible=False)
    handles = [Patch(facecolor=fills[kind], label=kind) for kind in cells]
    if beyond:
        handles.append(Patch(facecolor="none", label=f"(goes on to byte {data.sectors[-1] * SECTOR + SECTOR:,})"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _title(data: WarpLoad) -> str:
    if data.used == 1:
        return f"Every byte of {len(data.sectors)} sectors is used"
    return f"{len(data.sectors)} sectors are sent for {data.asked_for} bytes: {data.used:.0%} is used"


def _draw_sectors(ax: Axes, data: WarpLoad, lines: int) -> None:
    """Frame each touched sector that is on the page."""
    for sector in data.sectors:
        line, column = divmod(sector, _LINE // SECTOR)
        if line < lines:
            frame = Rectangle(
                (column * SECTOR, line + 0.06), SECTOR, 0.88, fill=False, edgecolor=style.INK, linewidth=1
            )
            ax.add_patch(frame)
