"""What naive and tiled attention move between slow and fast memory: to scale, against n, and against the tile."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from vllm_teach.attention.traffic import naive_traffic, tiled_traffic, working_set_bytes
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page


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


def draw_matrices(n: int, head_dim: int, tile: tuple[int, int] | None = None) -> tuple[Figure, Matrices]:
    """Draw Q, K, V, S, P and O of one head to scale (fp16, not causal); `tile` draws one tile of that size inside S.

    Returns the figure (8.4 x 3.9 inches) and its data.
    """
    size = {name: 2 * n * head_dim for name in ("Q", "K", "V", "O")} | {name: 2 * n * n for name in ("S", "P")}
    data = Matrices(n, head_dim, size)
    side, thin = 2.5, 2.5 * head_dim / n
    title = f"{data.share_of_scores:.1%} of the bytes are two matrices nobody asked for"
    figure, axes = page(8.4, 3.9, title + f" (to scale, n = {n:,}, d = {head_dim})")
    ink, scores = style.INK, style.tint(style.colour("naive"), 0.55)
    y, left, right = 0.42, 0.95, 4.45
    for x, name, note in ((left, "S", "scores"), (right, "P", "probabilities")):
        axes.add_patch(Rectangle((x, y), side, side, facecolor=scores, edgecolor=style.colour("naive")))
        text = f"{name}\n{note}\n{style.format_bytes(size[name])}\nwritten, then read"
        axes.text(x + side / 2, y + side / 2, text, ha="center", va="center", size=11, linespacing=1.4)
    strips = {
        "Q": (left - 0.22, y, thin, side),
        "K": (left, y + side + 0.16, side, thin),
        "V": (right + side + 0.22, y, thin, side),
        "O": (right + side + 0.95, y, thin, side),
    }
    for name, (x, bottom, w, h) in strips.items():
        axes.add_patch(Rectangle((x, bottom), w, h, facecolor=ink, edgecolor=ink, linewidth=0))
        text = f"{name}{'ᵀ' if name == 'K' else ''}  {style.format_bytes(size[name])}"
        if name == "K":
            axes.text(x + side / 2, bottom + thin + 0.06, text, ha="center", va="bottom", size=10)
        else:
            axes.text(
                x + w / 2 + (0.1 if name in "VO" else -0.1),
                y + side / 2,
                text,
                rotation=90,
                va="center",
                size=10,
                ha="left" if name in "VO" else "right",
            )
    arrow = {"arrowstyle": "-|>", "mutation_scale": 14, "color": "#33506B", "linewidth": 1.6}
    axes.add_patch(FancyArrowPatch((left + side + 0.1, y + side / 2), (right - 0.1, y + side / 2), **arrow))
    axes.text((left + side + right) / 2, y + side / 2 + 0.1, "softmax of\neach row", ha="center", va="bottom", size=10)
    axes.add_patch(FancyArrowPatch((right + side + 0.57, y - 0.17), (right + side + 0.95, y - 0.17), **arrow))
    axes.text(right + side + 0.5, y - 0.17, "P V", ha="right", va="center", size=10)
    axes.text(
        left - 0.22,
        y - 0.17,
        f"S and P are {n:,} × {n:,}; Q, K, V and O are {n:,} × {head_dim}",
        size=9,
        va="center",
        color=style.QUIET_INK,
    )
    if tile is not None:
        w, h = side * tile[1] / n, side * tile[0] / n
        axes.add_patch(Rectangle((left, y + side - h), w, h, facecolor=style.colour("tiled"), edgecolor="none"))
        axes.text(
            left + w + 0.06,
            y + side - 0.02,
            f"one tile, {tile[0]} × {tile[1]}",
            size=10,
            va="top",
            color=style.colour("tiled"),
            weight="bold",
        )
    return figure, data


@dataclass(frozen=True)
class TrafficCurves:
    """Bytes moved by one head at each n: naive, tiled, and the least possible (q, k, v read and out written once)."""

    lengths: tuple[int, ...]
    naive: tuple[int, ...]
    tiled: tuple[int, ...]
    least: tuple[int, ...]

    def slope(self, name: str) -> float:
        """How steep the curve is between its last two points, log against log: 1 is linear, 2 quadratic."""
        y: tuple[int, ...] = getattr(self, name)
        return float(np.log(y[-1] / y[-2]) / np.log(self.lengths[-1] / self.lengths[-2]))


def draw_traffic_by_length(
    ax: Axes, lengths: Sequence[int], tile: tuple[int, int], *, head_dim: int = 64, causal: bool = True
) -> TrafficCurves:
    """Draw bytes moved against n, both axes logarithmic (one head, fp16, 100 KiB of fast memory); returns the data."""

    def sizes(n: int) -> dict[str, int]:
        return {
            "batch": 1,
            "q_len": n,
            "kv_len": n,
            "q_heads": 1,
            "kv_heads": 1,
            "head_dim": head_dim,
            "input_bytes": 2,
        }

    tiles = {"tile_q": tile[0], "tile_k": tile[1]}
    data = TrafficCurves(
        lengths=tuple(lengths),
        naive=tuple(naive_traffic(**sizes(n)).bytes_moved for n in lengths),
        tiled=tuple(tiled_traffic(**sizes(n), **tiles, causal=causal).bytes_moved for n in lengths),
        least=tuple(4 * n * head_dim * 2 for n in lengths),
    )
    ax.plot(lengths, data.naive, "o-", color=style.colour("naive"), label="naive")
    ax.plot(lengths, data.tiled, "s-", color=style.colour("tiled"), label=f"tiled, {tile[0]} × {tile[1]}")
    ax.plot(lengths, data.least, "--", color=style.colour("ideal"), label="q, k, v, out once: the least")
    ratio = data.naive[-1] / data.tiled[-1]
    ax.annotate(
        "",
        (lengths[-1], data.naive[-1]),
        (lengths[-1], data.tiled[-1]),
        arrowprops={"arrowstyle": "<->", "color": style.QUIET_INK},
    )
    ax.text(lengths[-1] * 0.94, data.tiled[-1] * 1.45, f"{ratio:.1f} times fewer", ha="right", va="center", size=10)
    style.label_axis(ax, "x", "sequence length n", unit="tokens", kind="tokens", log=2, ticks=lengths)
    style.label_axis(ax, "y", "bytes moved", kind="bytes", log=2)
    ax.legend(loc="upper left")
    return data


@dataclass(frozen=True)
class TileSweep:
    """Bytes moved for each q tile: fast memory (bytes) -> bytes moved, the working sets, and naive's bytes."""

    tiles_q: tuple[int, ...]
    tile_k: int
    working_set: tuple[int, ...]
    moved: dict[int, tuple[int, ...]]
    naive: int

    def best(self, fast_memory: int) -> int:
        """The q tile that moves the fewest bytes with that much fast memory."""
        return self.tiles_q[int(np.argmin(self.moved[fast_memory]))]


def draw_traffic_by_tile(
    ax: Axes, n: int, tiles_q: Sequence[int], tile_k: int, fast_memories: dict[int, str], *, head_dim: int = 64
) -> TileSweep:
    """Draw bytes moved against tile_q (causal, one head, fp16), one line per fast memory {bytes: name}; returns the data.

    At most two fast memories. Filled markers fit the fast memory; open ones do not, and spill.
    """
    sizes = {"batch": 1, "q_len": n, "kv_len": n, "q_heads": 1, "kv_heads": 1, "head_dim": head_dim, "input_bytes": 2}
    moved = {
        fast: tuple(
            tiled_traffic(**sizes, causal=True, tile_q=tile, tile_k=tile_k, fast_memory_bytes=fast).bytes_moved
            for tile in tiles_q
        )
        for fast in fast_memories
    }
    working = tuple(working_set_bytes(tile, tile_k, head_dim, 2) for tile in tiles_q)
    data = TileSweep(tuple(tiles_q), tile_k, working, moved, naive_traffic(**sizes).bytes_moved)
    top = 2.6 * max(data.naive, *(max(values) for values in moved.values()))
    ax.set_ylim(min(min(values) for values in moved.values()) / 1.5, top)
    looks = zip(fast_memories.items(), ("tiled", "memory_efficient"), ("s", "o"), strict=True)
    for (fast, name), concept, marker in looks:
        colour, fits = style.colour(concept), [size <= fast for size in working]
        ax.plot(tiles_q, moved[fast], "-", color=colour, zorder=2)
        for tile, y, fit in zip(tiles_q, moved[fast], fits, strict=True):
            ax.plot(
                tile, y, marker, color=colour, markerfacecolor=colour if fit else style.PAPER, markersize=8, zorder=3
            )
        ax.plot([], [], f"{marker}-", color=colour, label=f"tiled, {name}")
        edge = 2**0.5 * max(tile for tile, fit in zip(tiles_q, fits, strict=True) if fit)
        ax.axvline(edge, color=colour, linestyle=":", linewidth=1.5, zorder=1)
        ax.text(edge / 1.03, top, f"fits {name}", ha="right", va="top", size=9.5, color=colour)
    ax.axhline(data.naive, color=style.colour("naive"), label="naive")
    style.label_axis(ax, "x", "tile_q", unit=f"rows; tile_k = {tile_k}", kind="tokens", log=2, ticks=tiles_q)
    style.label_axis(ax, "y", "bytes moved", kind="bytes", log=2)
    ax.legend(loc="lower left")
    return data
