"""How often a norm passes over its tensor: one bar for each operation, as long as what it reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vllm_teach.counters import Tally
from vllm_teach.teaching import style


@dataclass(frozen=True)
class NormPasses:
    """Bars in order, each (name, tensors read, tensors written): bytes over those of the tensor to be normalised."""

    bars: tuple[tuple[str, float, float], ...]

    def total(self, *names: str) -> float:
        """Tensors moved by the bars `names`, all of them where none is named."""
        return sum(read + written for name, read, written in self.bars if not names or name in names)


def norm_passes(tensor_bytes: int, tally: Tally) -> NormPasses:
    """Return the operations of `tally` in units of a tensor of `tensor_bytes`."""
    steps = tally.by_name.items()
    return NormPasses(
        tuple((name, work.bytes_read / tensor_bytes, work.bytes_written / tensor_bytes) for name, work in steps)
    )


def norm_totals(tensor_bytes: int, tallies: Mapping[str, Tally]) -> NormPasses:
    """Return one bar for the whole of each tally."""
    return NormPasses(
        tuple((name, one.bytes_read / tensor_bytes, one.bytes_written / tensor_bytes) for name, one in tallies.items())
    )


def draw_norm_passes(ax: Axes, data: NormPasses, fused: tuple[float, float] | None = None) -> NormPasses:
    """Draw the bars on `ax` from the top down, each from where the one before ended. Returns `data`.

    With `fused`, (tensors read, tensors written), one more bar stands below, for one kernel that does it all. A bar too
    short to be seen, a number for each row, is named all the same and has its length behind it.
    """
    ends: list[float] = []
    starts: list[float] = []
    for _, read, written in data.bars:
        starts.append(ends[-1] if ends else 0.0)
        ends.append(starts[-1] + read + written)
    bars = list(data.bars)
    if fused is not None:
        bars.append(("one kernel", *fused))
        starts.append(0.0)
    for row, (start, (_, read, written)) in enumerate(zip(starts, bars, strict=True)):
        _draw_bar(ax, row, start, read, written, named=row == 0)
        end = start + read + written
        ax.text(end + 0.01 * ends[-1], row, _amount(read + written), va="center", size=10)
        if row + 1 < len(ends):
            ax.plot([end, end], [row + 0.33, row + 0.67], color=style.colour("baseline"), linewidth=0.8)
    if fused is not None:
        ax.axhline(len(bars) - 1.5, color=style.INK, linewidth=0.8)
    ax.set(xlim=(0, 1.07 * ends[-1]), ylim=(len(bars) - 0.4, -0.6))
    ax.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False, axis="y")
    style.label_axis(ax, "x", "moved so far", unit="tensors of x's size")
    ax.legend(loc="upper right")
    return data


def draw_norm_totals(ax: Axes, data: NormPasses, least: float) -> NormPasses:
    """Draw one bar for each way to do it, with a line at the `least` that has to be moved. Returns `data`."""
    longest = max(read + written for _, read, written in data.bars)
    for row, (_, read, written) in enumerate(data.bars):
        _draw_bar(ax, row, 0.0, read, written, named=row == 0)
        total = read + written
        ax.text(total + 0.01 * longest, row, f"{_amount(total)} ({total / least:.3g} x)", va="center", size=10)
    ax.axvline(least, color=style.colour("ideal"), linewidth=1.5, linestyle="--", label="has to be moved", zorder=0)
    ax.set(xlim=(0, 1.17 * longest), ylim=(len(data.bars) - 0.4, -0.6))
    ax.set_yticks(range(len(data.bars)), [name for name, _, _ in data.bars])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False, axis="y")
    style.label_axis(ax, "x", "moved", unit="tensors of x's size")
    ax.legend(loc="lower right")
    return data


def _draw_bar(ax: Axes, row: int, start: float, read: float, written: float, *, named: bool) -> None:
    labels = ("read", "written") if named else (None, None)
    ax.barh(row, read, left=start, color=style.colour("read"), height=0.66, label=labels[0])
    ax.barh(row, written, left=start + read, color=style.colour("written"), height=0.66, label=labels[1])


def _amount(tensors: float) -> str:
    return f"{tensors:.3g}" if tensors >= 0.05 else "≈ 0"
