"""Patterns small enough to count with a pencil, side by side: every pair drawn, and the tiles by kind."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.attention.patterns import Pattern, TileKind
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_SIDE, _GAP, _LEFT, _TOP = 1.62, 0.34, 0.45, 0.98  # inches
_HIDDEN = style.tint(style.colour("skipped"), 0.25)
_MARKS = {TileKind.EMPTY: "E", TileKind.PARTIAL: "P", TileKind.FULL: "F"}


@dataclass(frozen=True, eq=False)
class SmallPattern:
    """One panel: the mask `[q_len, kv_len]`, and with a tile the kinds of its tiles, else None."""

    name: str
    mask: torch.Tensor
    kinds: torch.Tensor | None

    @property
    def keys_seen(self) -> tuple[int, ...]:
        """How many keys each query sees."""
        return tuple(self.mask.sum(dim=1).tolist())

    def count(self, kind: TileKind) -> int:
        """How many tiles are of this kind; 0 without tiles."""
        return 0 if self.kinds is None else int((self.kinds == kind).sum())


def draw_small_patterns(
    title: str, patterns: Mapping[str, Pattern], q_len: int, kv_len: int, tile: int | None = None
) -> tuple[Figure, dict[str, SmallPattern]]:
    """Draw each pattern for `q_len` queries and `kv_len` keys, up to five to a page; with `tile`, its tiles' kinds.

    Purple pairs are seen. The letter in a tile says E(MPTY), P(ARTIAL) or F(ULL). Returns the figure and its data.
    Raises InvalidArgumentError when a pattern is not defined for the lengths.
    """
    panels = {
        name: SmallPattern(
            name,
            pattern.mask(q_len, kv_len),
            None if tile is None else pattern.tile_map(q_len, kv_len, tile, tile),
        )
        for name, pattern in patterns.items()
    }
    cell = _SIDE / max(q_len, kv_len)
    height = q_len * cell
    width = _LEFT + len(panels) * (kv_len * cell + _GAP)
    figure, axes = page(max(width, 8.4), height + _TOP + 0.62, title=title)
    for column, panel in enumerate(panels.values()):
        _draw_panel(axes, _LEFT + column * (kv_len * cell + _GAP), 0.5, cell, panel, tile)
    axes.text(_LEFT - 0.24, 0.5 + height / 2, "query", rotation=90, ha="right", va="center", size=10)
    return figure, panels


def _draw_panel(axes: Axes, x: float, y: float, cell: float, panel: SmallPattern, tile: int | None) -> None:
    """Draw one mask, its last query in the bottom row; (x, y) is the lower left corner, inches."""
    q_len, kv_len = panel.mask.shape
    top = y + q_len * cell
    for query, row in enumerate(panel.mask.tolist()):
        for key, seen in enumerate(row):
            fill = style.colour("attention") if seen else _HIDDEN
            corner = (x + key * cell, top - (query + 1) * cell)
            axes.add_patch(Rectangle(corner, cell, cell, facecolor=fill, edgecolor=style.PAPER, linewidth=0.8))
    axes.text(x, top + 0.08, panel.name, size=10, va="bottom", linespacing=1.25)
    for key in range(kv_len):
        axes.text(x + (key + 0.5) * cell, y - 0.05, f"{key}", ha="center", va="top", size=8.5)
    for query in range(q_len):
        axes.text(x - 0.05, top - (query + 0.5) * cell, f"{query}", ha="right", va="center", size=8.5)
    axes.text(x + kv_len * cell / 2, y - 0.22, "key", ha="center", va="top", size=10)
    if tile is not None and panel.kinds is not None:
        _draw_tiles(axes, x, top, cell, panel.kinds, (q_len, kv_len), tile)


def _draw_tiles(
    axes: Axes, x: float, top: float, cell: float, kinds: torch.Tensor, lengths: tuple[int, int], tile: int
) -> None:
    for row, row_kinds in enumerate(kinds.tolist()):
        for column, kind in enumerate(row_kinds):
            width = min(tile, lengths[1] - column * tile) * cell
            height = min(tile, lengths[0] - row * tile) * cell
            left, upper = x + column * tile * cell, top - row * tile * cell
            axes.add_patch(
                Rectangle(
                    (left, upper - height), width, height, facecolor="none", edgecolor=style.INK, linewidth=1.1, zorder=3
                )
            )
            letter = axes.text(
                left + width / 2,
                upper - height / 2,
                _MARKS[TileKind(kind)],
                size=9.5,
                weight="bold",
                ha="center",
                va="center",
                color=style.INK,
                zorder=4,
            )
            letter.set_bbox({"boxstyle": "round,pad=0.12", "facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.85})
