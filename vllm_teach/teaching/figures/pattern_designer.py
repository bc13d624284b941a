"""A pattern twice, side by side: which keys each query sees, and what a tiled kernel makes of it."""

import textwrap
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.attention.patterns import Causal, Pattern, TileKind
from vllm_teach.attention.shapes import check_count
from vllm_teach.teaching import style

_HIDDEN = style.tint(style.colour("skipped"), 0.35)
_FILLS = {
    TileKind.FULL: style.colour("done"),
    TileKind.PARTIAL: style.tint(style.colour("done"), 0.45),
    TileKind.EMPTY: _HIDDEN,
}
_CELLS = 400  # about as many points as the mask's panel has on each side
_TILES_WITH_LINES = 1100  # beyond, borders and hatching would cover the colours


@dataclass(frozen=True, eq=False)
class PatternData:
    """What the figure shows of `pattern` for n queries and n keys: its mask and its tile map, and what they cost.

    mask is bool `[n, n]`, kinds int8 `[tiles, tiles]` of TileKind, density the share of the pairs that are visible.
    `computed` counts the scores in visited tiles, and `causal` those that the causal mask makes a kernel with the same
    tile compute.
    """

    pattern: Pattern
    n: int
    tile: int
    mask: torch.Tensor
    kinds: torch.Tensor
    density: float
    computed: int
    causal: int

    @property
    def visited(self) -> int:
        """Tiles that are computed."""
        return self.count(TileKind.FULL) + self.count(TileKind.PARTIAL)

    @property
    def share(self) -> float:
        """The share of all tiles that are visited."""
        return self.visited / self.kinds.numel()

    @property
    def cost(self) -> float:
        """Scores computed, relative to full causal attention with the same tile."""
        return self.computed / self.causal

    def count(self, kind: TileKind) -> int:
        """How many tiles are of this kind."""
        return int((self.kinds == kind).sum())

    def describe(self) -> str:
        """The counts in one line."""
        return (
            f"density {_percent(self.density)}, {self.visited} of {self.kinds.numel()} tiles visited "
            f"({self.count(TileKind.PARTIAL)} cut by the mask), {self.cost:.2f} x the scores of full causal attention"
        )


def pattern_data(pattern: Pattern, n: int, tile: int) -> PatternData:
    """Return the mask, the tile map and the cost of `pattern` for n queries and n keys.

    Raises InvalidArgumentError unless n and tile are at least 1, and when the pattern is not defined for n keys.
    """
    check_count("n", n, 1)
    kinds = pattern.tile_map(n, n, tile, tile)
    return PatternData(
        pattern=pattern,
        n=n,
        tile=tile,
        mask=pattern.mask(n, n),
        kinds=kinds,
        density=pattern.density(n, n),
        computed=_scores(kinds, n, tile),
        causal=_scores(Causal().tile_map(n, n, tile, tile), n, tile),
    )


def draw_pattern(pattern: Pattern, n: int, tile: int, *, name: str | None = None) -> tuple[Figure, PatternData]:
    """Draw the mask of `pattern` and its tile map, to scale; `name` is what the title calls it.

    The tiles' colours: FULL are computed as they are, PARTIAL (hatched) masked, EMPTY (grey) never read. Quick
    enough for a slider up to n = 2,048. Returns figure and data. Raises InvalidArgumentError as `pattern_data` does.
    """
    data = pattern_data(pattern, n, tile)
    figure = plt.figure(figsize=(8.4, 4.9), layout="none")
    title = f"{data.cost:.2f} × the work of full causal attention"
    figure.text(0.012, 0.98, f"{name}: {title}" if name else title, size=12, weight="bold", va="top", color=style.INK)
    written = textwrap.shorten(repr(pattern), 118, placeholder=" …")
    figure.text(0.012, 0.925, written, size=9.5, va="top", color=style.QUIET_INK)
    left, right = figure.add_axes((0.085, 0.175, 0.385, 0.66)), figure.add_axes((0.585, 0.175, 0.385, 0.66))
    _draw_mask(left, data)
    _draw_tiles(right, data)
    return figure, data


def _scores(kinds: torch.Tensor, n: int, tile: int) -> int:
    """How many scores the visited tiles hold; the last tile of an axis may be short."""
    sides = torch.clamp(n - torch.arange(0, n, tile), max=tile)  # [tiles]
    return int((sides[:, None] * sides[None, :])[kinds != TileKind.EMPTY].sum())


def _draw_mask(ax: Axes, data: PatternData) -> None:
    colours = LinearSegmentedColormap.from_list("seen", [_HIDDEN, style.colour("attention")])
    cells, end = share_seen(data.mask, _CELLS)
    ax.imshow(cells.numpy(), cmap=colours, vmin=0, vmax=1, extent=(0, end, end, 0), interpolation="nearest")
    ax.set_title(f"Mask: {_percent(data.density)} of the pairs", size=10.5, weight="normal")
    _label(ax, data)
    _legend(ax, [Patch(facecolor=style.colour("attention"), label="seen"), Patch(facecolor=_HIDDEN, label="hidden")])


def share_seen(mask: torch.Tensor, cells: int) -> tuple[torch.Tensor, int]:
    """Return what share of each cell's pairs is visible, at most `cells` cells a side, and where the last cell ends.

    A screen has fewer points than a long mask has pairs: a thin line turns pale instead of vanishing. The last cells
    may reach beyond the mask; nothing is visible there.
    """
    n = len(mask)
    side = -(-n // cells)
    rows = torch.zeros(-(-n // side), n)
    rows.index_add_(0, torch.arange(n) // side, mask.float())
    shares = torch.zeros(len(rows), len(rows))
    shares.index_add_(1, torch.arange(n) // side, rows)
    return shares / side**2, len(rows) * side


def _draw_tiles(ax: Axes, data: PatternData) -> None:
    lines = data.kinds.numel() <= _TILES_WITH_LINES
    handles = []
    for kind, fill in _FILLS.items():
        hatch = "////" if kind == TileKind.PARTIAL and lines else None
        edge = "none" if not lines else "#9A9A9A" if kind == TileKind.EMPTY else style.INK
        tiles = PatchCollection(_boxes(data, kind), facecolor=fill, edgecolor=edge, linewidth=0.5, hatch=hatch)
        tiles.set(label=kind.name, antialiased=lines)  # without borders, smoothed edges would show as seams
        ax.add_collection(tiles)
        words = f"{kind.name.lower()}: {data.count(kind)}"
        handles.append(Patch(facecolor=fill, edgecolor=edge, linewidth=0.5, hatch=hatch, label=words))
    words = f"Tiles of {data.tile} × {data.tile}: {_percent(data.share)} visited"
    ax.set_title(words, size=10.5, weight="normal")
    _label(ax, data)
    _legend(ax, handles)


def _boxes(data: PatternData, kind: TileKind) -> list[Rectangle]:
    """The tiles of one kind, x to the right as keys, y down as queries; the last ones cut where the matrix ends."""
    corners = (torch.nonzero(data.kinds == kind) * data.tile).tolist()
    return [
        Rectangle((key, query), min(data.tile, data.n - key), min(data.tile, data.n - query)) for query, key in corners
    ]


def _label(ax: Axes, data: PatternData) -> None:
    ax.set(xlim=(0, data.n), ylim=(data.n, 0), aspect="equal")
    ticks = range(0, data.n + 1, max(1, data.n // 4))
    style.label_axis(ax, "x", "key", kind="tokens", ticks=ticks)
    style.label_axis(ax, "y", "query", kind="tokens", ticks=ticks)
    ax.grid(False)


def _legend(ax: Axes, handles: list[Patch]) -> None:
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.155),
        ncols=len(handles),
        columnspacing=1.0,
        handlelength=1.3,
        handletextpad=0.5,
        borderaxespad=0,
        fontsize=9.5,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
