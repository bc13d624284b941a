"""Attention on matrices small enough for a pencil: every number of Q, K, S, P, V and O in its place.

The matrices stand as one writes a matrix product by hand: the right factor above the result, the left factor beside it.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.attention import naive_attention
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_CELL = 0.46  # inches; all matrices are drawn to this scale
_GAP = 0.62


@dataclass(frozen=True)
class HandData:
    """What the figure shows, float64: products q·k `[n, n]` before the scale, P `[n, n]` and O `[n, d]`."""

    products: torch.Tensor
    probs: torch.Tensor
    out: torch.Tensor
    visible: torch.Tensor


def by_hand_data(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = True) -> HandData:
    """Return every intermediate of one head: q, k and v are `[n, d]`; computed in float64."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    out, probs = naive_attention(
        q[None, :, None], k[None, :, None], v[None, :, None], causal=causal, scale=scale, return_probs=True
    )
    n = q.shape[0]
    visible = torch.ones(n, k.shape[0], dtype=torch.bool)
    return HandData(q @ k.T, probs[0, 0], out[0, :, 0], visible.tril(k.shape[0] - n) if causal else visible)


def draw_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, scale_name: str, causal: bool = True
) -> tuple[Figure, HandData]:
    """Draw Q, Kᵀ, their products, P, V and O of one head, each cell with its number; returns figure and data.

    q, k and v are `[n, d]` with small whole numbers; `scale_name` is how the scale is written ("ln 2"). The cells of P
    are as dark as their weight; cells that the mask hides are hatched and empty.
    """
    data = by_hand_data(q, k, v, scale=scale, causal=causal)
    (n, d), keys, above = q.shape, k.shape[0], max(q.shape[1], v.shape[0]) * _CELL + _GAP
    left = 0.5
    x_s, x_p = left + d * _CELL + _GAP * 0.55, left + (d + keys) * _CELL + _GAP * 2.9
    x_o = x_p + keys * _CELL + _GAP * 0.55
    width, bottom = x_o + d * _CELL + 0.55, 0.42
    figure, axes = page(
        width, bottom + n * _CELL + above + 0.62, "Each query weighs the keys it sees, then averages their values"
    )
    top = bottom + n * _CELL + 0.3
    _matrix(axes, left, bottom, q, f"Q  [{n}, {d}]")
    _matrix(axes, x_s, top + 0.12, k.T, f"Kᵀ  [{d}, {keys}]", name_above=True)
    _matrix(axes, x_s, bottom, data.products, f"QKᵀ  [{n}, {keys}],  S = {scale_name} · QKᵀ", hidden=~data.visible)
    _matrix(axes, x_p, bottom, data.probs, f"P = softmax(S)  [{n}, {keys}]", hidden=~data.visible, shaded=True)
    _matrix(axes, x_o, top + 0.12, v, f"V  [{keys}, {d}]", name_above=True)
    _matrix(axes, x_o, bottom, data.out, f"O = PV  [{n}, {d}]")
    arrow_y = bottom + n * _CELL / 2
    start, end = x_s + keys * _CELL + 0.16, x_p - 0.16
    axes.annotate("", (end, arrow_y), (start, arrow_y), arrowprops={"arrowstyle": "-|>", "color": style.INK, "lw": 1.4})
    middle = (start + end) / 2
    axes.text(middle, arrow_y + 0.1, f"times {scale_name},\nexp,", ha="center", va="bottom", size=9, linespacing=1.2)
    axes.text(middle, arrow_y - 0.1, "each row\n÷ its sum", ha="center", va="top", size=9, linespacing=1.2)
    return figure, data


def _matrix(
    axes: Axes,
    x: float,
    y: float,
    values: torch.Tensor,
    name: str,
    *,
    hidden: torch.Tensor | None = None,
    shaded: bool = False,
    name_above: bool = False,
) -> None:
    """Draw one matrix with its lower left corner at (x, y), inches, and its name below (or above) it."""
    rows, columns = values.shape
    for row in range(rows):
        for column in range(columns):
            value = float(values[row, column])
            corner = (x + column * _CELL, y + (rows - 1 - row) * _CELL)
            if hidden is not None and bool(hidden[row, column]):
                axes.add_patch(
                    Rectangle(
                        corner, _CELL, _CELL, facecolor="#F4F4F4", edgecolor="#C4C4C4", hatch="////", linewidth=0.6
                    )
                )
                continue
            fill = style.tint(style.colour("attention"), value) if shaded else style.tint(style.colour("room"), 0.7)
            axes.add_patch(Rectangle(corner, _CELL, _CELL, facecolor=fill, edgecolor="#7F8C97", linewidth=0.9))
            centre = (corner[0] + _CELL / 2, corner[1] + _CELL / 2)
            axes.text(*centre, _fraction(value), ha="center", va="center_baseline", size=10, color=style.ink_on(fill))
    name_y, side = (y + rows * _CELL + 0.07, "bottom") if name_above else (y - 0.07, "top")
    axes.text(x + columns * _CELL / 2, name_y, name, ha="center", va=side, size=9.5)


def _fraction(value: float) -> str:
    """Write 0.125 as "1/8" and 4.0 as "4"."""
    return str(Fraction(value).limit_denominator(64))
