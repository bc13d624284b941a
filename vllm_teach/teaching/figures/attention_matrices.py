"""The matrices of one attention head, drawn to scale: what was asked for, and what naive attention writes besides."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_SIDE = 2.5  # S and P on the page, inches
_LEFT, _RIGHT, _BOTTOM = 0.95, 4.45, 0.42  # lower left corners of S and P


@dataclass(frozen=True)
class Matrices:
    """Bytes of each matrix of one head (fp16), and the bytes naive attention moves: S and P twice, the others once."""

    n: int
    head_dim: int
    size: dict[str, int]

    @property
    def asked_for(self) -> int:
        """Bytes of q, k, v and out: what a caller hands over and gets back."""
        return sum(self.size[name] for name in ("Q", "K", "V", "O"))

    @property
    def moved(self) -> int:
        """Bytes that naive attention moves."""
        return self.asked_for + 2 * (self.size["S"] + self.size["P"])

    @property
    def share_of_scores(self) -> float:
        """The part of the moved bytes that is S and P."""
        return 1 - self.asked_for / self.moved


def draw_matrices(n: int, head_dim: int) -> tuple[Figure, Matrices]:
    """Draw Q, K, V, S, P and O of one head to scale (fp16, not causal); returns the figure (8.4 x 3.9 in) and data."""
    size = dict.fromkeys(("Q", "K", "V", "O"), 2 * n * head_dim) | dict.fromkeys(("S", "P"), 2 * n * n)
    data = Matrices(n, head_dim, size)
    title = f"{data.share_of_scores:.1%} of the bytes are two matrices nobody asked for"
    figure, axes = page(8.4, 3.9, f"{title} (to scale, n = {n:,}, d = {head_dim})")
    fill, edge = style.tint(style.colour("naive"), 0.55), style.colour("naive")
    for x, name, note in ((_LEFT, "S", "scores"), (_RIGHT, "P", "probabilities")):
        axes.add_patch(Rectangle((x, _BOTTOM), _SIDE, _SIDE, facecolor=fill, edgecolor=edge))
        text = f"{name}\n{note}\n{style.format_bytes(size[name])}\nwritten, then read"
        axes.text(x + _SIDE / 2, _BOTTOM + _SIDE / 2, text, ha="center", va="center", size=11, linespacing=1.4)
    thin, middle = _SIDE * head_dim / n, _BOTTOM + _SIDE / 2
    for name, x in (("Q", _LEFT - 0.22), ("V", _RIGHT + _SIDE + 0.22), ("O", _RIGHT + _SIDE + 0.95)):
        _strip(axes, x, _BOTTOM, thin, _SIDE)
        side = -0.1 if name == "Q" else 0.1
        text = f"{name}  {style.format_bytes(size[name])}"
        axes.text(x + side, middle, text, rotation=90, va="center", size=10, ha="right" if side < 0 else "left")
    _strip(axes, _LEFT, _BOTTOM + _SIDE + 0.16, _SIDE, thin)
    text = f"Kᵀ  {style.format_bytes(size['K'])}"
    axes.text(_LEFT + _SIDE / 2, _BOTTOM + _SIDE + thin + 0.22, text, ha="center", va="bottom", size=10)
    _arrow(axes, _LEFT + _SIDE + 0.1, _RIGHT - 0.1, middle)
    axes.text((_LEFT + _SIDE + _RIGHT) / 2, middle + 0.1, "softmax of\neach row", ha="center", va="bottom", size=10)
    _arrow(axes, _RIGHT + _SIDE + 0.57, _RIGHT + _SIDE + 0.95, _BOTTOM - 0.17)
    axes.text(_RIGHT + _SIDE + 0.5, _BOTTOM - 0.17, "P V", ha="right", va="center", size=10)
    note = f"S and P are {n:,} × {n:,}; Q, K, V and O are {n:,} × {head_dim}"
    axes.text(_LEFT - 0.22, _BOTTOM - 0.17, note, size=9, va="center", color=style.QUIET_INK)
    return figure, data


def _strip(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=style.INK, edgecolor="none"))


def _arrow(axes: Axes, start: float, end: float, y: float) -> None:
    axes.add_patch(
        FancyArrowPatch((start, y), (end, y), arrowstyle="-|>", mutation_scale=14, color="#33506B", linewidth=1.6)
    )
