"""Patterns small enough to count with a pencil, side by side: every pair drawn, and under it the tiles by kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.attention.patterns import Pattern, TileKind
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_WIDTH, _LARGEST, _GAP, _LEFT = 8.4, 1.9, 0.3, 0.62  # inches
_HIDDEN = style.tint(style.colour("skipped"), 0.25)
_TILES: dict[TileKind, dict[str, Any]] = {
    TileKind.EMPTY: {"facecolor": style.tint(style.colour("skipped"), 0.35)},
    TileKind.PARTIAL: {"facecolor": style.tint(style.colour("done"), 0.45), "hatch": "////"},
    TileKind.FULL: {"facecolor": style.colour("done")},
}


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
    """Draw each pattern for `q_len` queries and `kv_len` keys, up to five on a page; with `tile`, its tile map too.

    Purple pairs are seen; the tiles have the colours of `pattern_designer`. Returns the figure and its data. Raises
    InvalidArgumentError when a pattern is not defined for the lengths, or the tile not positive.
    """
    panels = {}
    for name, pattern in patterns.items():
        kinds = None if tile is None else pattern.tile_map(q_len, kv_len, tile, tile)
        panels[name] = SmallPattern(name, pattern.mask(q_len, kv_len), kinds)
    side = min(_LARGEST, (_WIDTH - _LEFT) / len(panels) - _GAP)
    cell = side / max(q_len, kv_len)
    height, lines = q_len * cell, max(name.count("\n") + 1 for name in panels)
    below = 0.5 if tile is None else 0.5 + height + 0.46
    figure, axes = page(_WIDTH, below + height + 0.2 * lines + 0.42, title=title)
    for column, panel in enumerate(panels.values()):
        x = _LEFT + column * (kv_len * cell + _GAP)
        _draw_mask(axes, x, below, cell, panel)
        if tile is not None and panel.kinds is not None:
            _draw_tiles(axes, x, below - 0.46, cell, panel, tile)
    for y in [below] if tile is None else [below, 0.5]:
        axes.text(_LEFT - 0.26, y + height / 2, "query", rotation=90, ha="right", va="center", size=10)
    if tile is not None:
        handles = [Patch(edgecolor=style.INK, linewidth=0.6, label=kind.name, **look) for kind, look in _TILES.items()]
        figure.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 0.0), borderaxespad=0.1)
    return figure, panels


def _draw_mask(axes: Axes, x: float, y: float, cell: float, panel: SmallPattern) -> None:
    """Draw one mask, its last query in the bottom row; (x, y) is the lower left corner, inches."""
    q_len, kv_len = panel.mask.shape
    top = y + q_len * cell
    for query, row in enumerate(panel.mask.tolist()):
        for key, seen in enumerate(row):
            fill = style.colour("attention") if seen else _HIDDEN
            corner = (x + key * cell, top - (query + 1) * cell)
            axes.add_patch(Rectangle(corner, cell, cell, facecolor=fill, edgecolor=style.PAPER, linewidth=0.8))
    axes.text(x, top + 0.07, panel.name, size=10, va="bottom", linespacing=1.25)
    for key in range(kv_len):
        axes.text(x + (key + 0.5) * cell, y - 0.05, f"{key}", ha="center", va="top", size=8.5)
    for query in range(q_len):
        axes.text(x - 0.05, top - (query + 0.5) * cell, f"{query}", ha="right", va="center", size=8.5)
    if panel.kinds is None:
        axes.text(x + kv_len * cell / 2, y - 0.22, "key", ha="center", va="top", size=10)


def _draw_tiles(axes: Axes, x: float, top: float, cell: float, panel: SmallPattern, tile: int) -> None:
    """Draw the tile map; (x, top) is its upper left corner."""
    q_len, kv_len = panel.mask.shape
    assert panel.kinds is not None
    for row, row_kinds in enumerate(panel.kinds.tolist()):
        for column, kind in enumerate(row_kinds):
            width = min(tile, kv_len - column * tile) * cell
            height = min(tile, q_len - row * tile) * cell
            left, upper = x + column * tile * cell, top - row * tile * cell
            look: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 0.6, **_TILES[TileKind(kind)]}
            axes.add_patch(Rectangle((left, upper - height), width, height, **look))
