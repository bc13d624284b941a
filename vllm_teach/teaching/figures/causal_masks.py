"""The causal mask when there are fewer queries than keys: aligned top-left or bottom-right."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

Corner = Literal["top-left", "bottom-right"]
_CELL = 0.36


@dataclass(frozen=True)
class MaskData:
    """One panel: its title, the mask `[q_len, kv_len]` (True: may see), and how many keys each query sees."""

    title: str
    mask: torch.Tensor
    keys_seen: tuple[int, ...]


def causal_mask_data(q_len: int, kv_len: int, corner: Corner) -> MaskData:
    """Return the mask in which query i sees key j iff j <= i (top-left) or j <= i + kv_len - q_len (bottom-right).

    Raises InvalidArgumentError unless 1 <= q_len <= kv_len.
    """
    if not 1 <= q_len <= kv_len:
        raise InvalidArgumentError(f"q_len={q_len} with kv_len={kv_len} cannot be drawn: use 1 <= q_len <= kv_len.")
    offset = 0 if corner == "top-left" else kv_len - q_len
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)
    return MaskData(corner, mask, tuple(mask.sum(dim=-1).tolist()))


def draw_causal_masks(kv_len: int = 5) -> tuple[Figure, dict[str, MaskData]]:
    """Draw three masks over `kv_len` keys: a prefill, a decode step top-left, a decode step bottom-right.

    Rows of queries that were computed in earlier steps are drawn as outlines. Returns figure and data by panel
    ("prefill", "top-left", "bottom-right").
    """
    prefill = causal_mask_data(kv_len, kv_len, "bottom-right")
    panels = {
        "prefill": MaskData(f"prefill: {kv_len} queries\nboth rules agree", prefill.mask, prefill.keys_seen),
        "top-left": _decode(kv_len, "top-left"),
        "bottom-right": _decode(kv_len, "bottom-right"),
    }
    side, gap, left = kv_len * _CELL, 0.72, 0.75
    figure, axes = page(
        left + 3 * side + 2 * gap + 0.25,
        side + 1.5,
        "A cached decode step sees all its keys only with the mask bottom-right",
    )
    for column, panel in enumerate(panels.values()):
        _draw_panel(axes, left + column * (side + gap), 0.62, panel, kv_len)
    axes.text(left - 0.12, 0.62 + side / 2, "query", rotation=90, ha="right", va="center", size=10)
    return figure, panels


def _decode(kv_len: int, corner: Corner) -> MaskData:
    data = causal_mask_data(1, kv_len, corner)
    seen = data.keys_seen[0]
    return MaskData(f"decode, {corner}:\nsees {seen} of {kv_len} keys", data.mask, data.keys_seen)


def _draw_panel(axes: Axes, x: float, y: float, panel: MaskData, kv_len: int) -> None:
    """Draw one mask with its last query in the bottom row; (x, y) is the lower left corner, inches."""
    q_len = panel.mask.shape[0]
    for row in range(kv_len):
        query = row - (kv_len - q_len)
        for key in range(kv_len):
            corner = (x + key * _CELL, y + (kv_len - 1 - row) * _CELL)
            look: dict[str, Any]
            if query < 0:
                look = {"facecolor": style.PAPER, "edgecolor": "#E0E0E0", "linewidth": 0.8}
            elif bool(panel.mask[query, key]):
                look = {"facecolor": style.colour("attention"), "edgecolor": style.INK, "linewidth": 0.9}
            else:
                look = {"facecolor": "#F4F4F4", "edgecolor": "#9A9A9A", "linewidth": 0.9, "hatch": "////"}
            axes.add_patch(Rectangle(corner, _CELL, _CELL, **look))
    side = kv_len * _CELL
    axes.text(x, y + side + 0.1, panel.title, size=10, va="bottom", linespacing=1.3)
    for key in range(kv_len):
        axes.text(x + (key + 0.5) * _CELL, y - 0.06, f"{key}", ha="center", va="top", size=9)
    axes.text(x + side / 2, y - 0.27, "key", ha="center", va="top", size=10)
