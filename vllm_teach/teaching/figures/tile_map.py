"""The attention matrix cut into tiles, to scale: which are computed, which the mask cuts, which are never read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from vllm_teach.attention.patterns import Causal, TileKind
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.traffic import naive_traffic, tile_pairs, tiled_traffic, working_set_bytes
from vllm_teach.teaching import style

_SKIPPED = style.tint(style.colour("skipped"), 0.5)  # lighter, so that the large empty part does not outweigh the rest


@dataclass(frozen=True)
class TileMap:
    """Every tile as (q_start, q_end, k_start, k_end), by kind, and what the choice of tile costs (one head).

    `computed` and `needed` count scores: those in visited tiles, and those the mask lets through.
    """

    q_len: int
    kv_len: int
    tile_q: int
    tile_k: int
    whole: tuple[tuple[int, int, int, int], ...]
    cut: tuple[tuple[int, int, int, int], ...]
    skipped: tuple[tuple[int, int, int, int], ...]
    computed: int
    needed: int
    bytes_moved: int
    naive_bytes: int
    working_set: int
    fast_memory: int

    @property
    def visited(self) -> int:
        """Tiles that are computed."""
        return len(self.whole) + len(self.cut)

    @property
    def tiles(self) -> int:
        """All tiles of the matrix."""
        return self.visited + len(self.skipped)

    @property
    def fits(self) -> bool:
        """Whether one tile pair's working set fits the fast memory."""
        return self.working_set <= self.fast_memory

    def describe(self) -> str:
        """The counts in one line."""
        return (
            f"{self.visited} of {self.tiles} tiles visited ({len(self.cut)} cut by the mask), "
            f"{self.computed / self.needed:.2f} scores computed per score needed, "
            f"{style.format_bytes(self.bytes_moved)} moved, working set {style.format_bytes(self.working_set)} "
            f"{'fits' if self.fits else 'does not fit: spills'}"
        )


def tile_map(
    q_len: int,
    kv_len: int,
    tile_q: int,
    tile_k: int,
    *,
    head_dim: int = 64,
    input_bytes: int = 2,
    fast_memory: int = 102_400,
) -> TileMap:
    """Sort the tiles of causal attention (bottom-right) by kind, from the package's own loop `tile_pairs`."""
    shape = AttentionShape(1, q_len, kv_len, 1, 1, head_dim)
    whole: list[tuple[int, int, int, int]] = []
    cut: list[tuple[int, int, int, int]] = []
    visited = set()
    for (q_start, q_end), k_tiles in tile_pairs(shape, Causal(), tile_q, tile_k):
        for (k_start, k_end), kind in k_tiles:
            visited.add((q_start, k_start))
            tiles = whole if kind == TileKind.FULL else cut
            tiles.append((q_start, q_end, k_start, k_end))
    skipped = [
        (q, min(q + tile_q, q_len), k, min(k + tile_k, kv_len))
        for q in range(0, q_len, tile_q)
        for k in range(0, kv_len, tile_k)
        if (q, k) not in visited
    ]
    sizes: dict[str, Any] = {
        "batch": 1,
        "q_len": q_len,
        "kv_len": kv_len,
        "q_heads": 1,
        "kv_heads": 1,
        "head_dim": head_dim,
    }
    tiled = tiled_traffic(
        **sizes, input_bytes=input_bytes, causal=True, tile_q=tile_q, tile_k=tile_k, fast_memory_bytes=fast_memory
    )
    return TileMap(
        q_len=q_len,
        kv_len=kv_len,
        tile_q=tile_q,
        tile_k=tile_k,
        whole=tuple(whole),
        cut=tuple(cut),
        skipped=tuple(skipped),
        computed=sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in (*whole, *cut)),
        needed=sum(min(max(query + shape.causal_offset + 1, 0), kv_len) for query in range(q_len)),
        bytes_moved=tiled.bytes_moved,
        naive_bytes=naive_traffic(**sizes, input_bytes=input_bytes).bytes_moved,
        working_set=working_set_bytes(min(tile_q, q_len), min(tile_k, kv_len), head_dim, input_bytes),
        fast_memory=fast_memory,
    )


@dataclass(frozen=True)
class BarEnds:
    """Where the axes of the two bar panels end, in bytes: one pair for all pictures that are to be compared."""

    working_set: int
    bytes_moved: int


def bar_ends(maps: Iterable[TileMap]) -> BarEnds:
    """The largest working set (or fast memory) and the most bytes moved among `maps`, naive attention included."""
    every = list(maps)
    return BarEnds(
        working_set=max(max(one.working_set, one.fast_memory) for one in every),
        bytes_moved=max(max(one.bytes_moved, one.naive_bytes) for one in every),
    )


def draw_tile_map(data: TileMap, ends: BarEnds | None = None) -> Figure:
    """Draw the map to scale beside two bars: working set against fast memory, bytes moved against naive's.

    Give the same `ends` to all settings of a slider, or the bars of each have a scale of their own.
    """
    ends = ends or bar_ends([data])
    figure = plt.figure(figsize=(8.4, 4.6), layout="none")
    title = f"{len(data.skipped)} of {data.tiles} tiles are never read (causal, tiles of {data.tile_q} × {data.tile_k})"
    figure.text(0.012, 0.975, title, size=12, weight="bold", va="top", color=style.INK)
    _draw_matrix(figure.add_axes((0.10, 0.12, 0.425, 0.775)), data)
    top, bottom = figure.add_axes((0.63, 0.52, 0.34, 0.10)), figure.add_axes((0.63, 0.135, 0.34, 0.18))
    needed = [("", data.working_set, "tiled")]
    _draw_bars(top, needed, "Fast memory that one tile needs", ends.working_set, data.fast_memory)
    bars = [("naive", data.naive_bytes, "naive"), ("tiled", data.bytes_moved, "tiled")]
    _draw_bars(bottom, bars, "Bytes moved (one head, d = 64, fp16)", ends.bytes_moved, None)
    figure.legend(handles=_legend(data), loc="upper left", bbox_to_anchor=(0.60, 0.92))
    return figure


def _legend(data: TileMap) -> list[Patch]:
    return [
        Patch(facecolor=style.colour("done"), edgecolor=style.INK, label=f"visited, whole: {len(data.whole)}"),
        Patch(
            facecolor=style.colour("done"),
            edgecolor=style.INK,
            hatch="////",
            linewidth=0,
            label=f"cut by the mask: {len(data.cut)} (hatched: wasted)",
        ),
        Patch(facecolor=_SKIPPED, edgecolor="#8A8A8A", label=f"skipped: {len(data.skipped)}"),
    ]


def _draw_matrix(ax: Axes, data: TileMap) -> None:
    def boxes(tiles: tuple[tuple[int, int, int, int], ...]) -> list[Rectangle]:
        return [Rectangle((k0, q0), k1 - k0, q1 - q0) for q0, q1, k0, k1 in tiles]

    line = 0.8 if data.tiles <= 400 else 0.3
    visited = boxes((*data.whole, *data.cut))
    ax.add_collection(PatchCollection(visited, facecolor=style.colour("done"), edgecolor=style.INK, linewidth=line))
    offset = data.kv_len - data.q_len
    beyond = [(offset + 0.0, 0.0), (data.kv_len, 0.0), (data.kv_len, data.q_len)]
    ax.add_patch(Polygon(beyond, facecolor="none", edgecolor=style.INK, hatch="////", linewidth=0))
    skipped = boxes(data.skipped)
    ax.add_collection(PatchCollection(skipped, facecolor=_SKIPPED, edgecolor="#8A8A8A", linewidth=line))
    ax.plot([offset, data.kv_len], [0, data.q_len], color=style.colour("limit"), linewidth=2)
    ax.set(xlim=(0, data.kv_len), ylim=(data.q_len, 0), aspect="equal", xlabel="key", ylabel="query")
    for which in ("x", "y"):
        length = data.kv_len if which == "x" else data.q_len
        style.label_axis(
            ax,
            which,
            "key" if which == "x" else "query",
            kind="tokens",
            ticks=range(0, length + 1, max(1, length // 4)),
        )
    ax.grid(False)


def _draw_bars(ax: Axes, bars: list[tuple[str, int, str]], title: str, end: int, limit: int | None) -> None:
    for row, (_, size, concept) in enumerate(bars):
        ax.barh(row, size, color=style.colour(concept), height=0.62)
        inside = size > 0.6 * end
        beside = size if inside else max(size, limit or 0)  # not across the limit's line
        ax.text(
            beside + (-0.02 if inside else 0.02) * end,
            row,
            style.format_bytes(size),
            ha="right" if inside else "left",
            va="center",
            size=10,
            color=style.ink_on(style.colour(concept)) if inside else style.INK,
        )
    if limit:
        ax.axvline(limit, color=style.colour("limit"), linewidth=2)
        text = f" limit {style.format_bytes(limit)} "
        side = "right" if limit > 0.6 * end else "left"
        ax.text(limit, -0.52, text, color=style.colour("limit"), ha=side, va="bottom", size=10)
    ax.set(xlim=(0, 1.06 * end), ylim=(-0.5, len(bars) - 0.5))
    ax.set_yticks(range(len(bars)) if len(bars) > 1 else [], [name for name, _, _ in bars if len(bars) > 1])
    step = 1 << max(end.bit_length() - 2, 0)  # two or three ticks beside zero
    style.label_axis(ax, "x", "", kind="bytes", ticks=range(0, end + 1, step))
    ax.invert_yaxis()
    ax.set_title(title, size=10.5, weight="normal", pad=16 if limit else None)
    ax.grid(False)
