"""What naive and tiled attention move between slow and fast memory: against n, and against the tile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from vllm_teach.attention.traffic import naive_traffic, tiled_traffic, working_set_bytes
from vllm_teach.performance import log_log_slope
from vllm_teach.teaching import style


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
        return log_log_slope(self.lengths[-2:], y[-2:])


def draw_traffic_by_length(
    ax: Axes, lengths: Sequence[int], tile: tuple[int, int], *, head_dim: int = 64, causal: bool = True
) -> TrafficCurves:
    """Draw bytes moved against n, both axes logarithmic (one head, fp16, 100 KiB of fast memory); returns the data."""

    def sizes(n: int) -> dict[str, Any]:
        return {
            "batch": 1,
            "q_len": n,
            "kv_len": n,
            "q_heads": 1,
            "kv_heads": 1,
            "head_dim": head_dim,
            "input_bytes": 2,
        }

    tiles: dict[str, Any] = {"tile_q": tile[0], "tile_k": tile[1]}
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
    ax.text(
        lengths[-1] * 0.94, 0.8 * (data.naive[-1] * data.tiled[-1]) ** 0.5, f"{ratio:.1f}×", ha="right", va="center"
    )
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

    def largest_tile(self, fast_memory: int) -> float:
        """The tile_q at which the working set, linear in tile_q, reaches the fast memory."""
        slope = (self.working_set[-1] - self.working_set[0]) / (self.tiles_q[-1] - self.tiles_q[0])
        return self.tiles_q[0] + (fast_memory - self.working_set[0]) / slope

    def best(self, fast_memory: int) -> int:
        """The q tile that moves the fewest bytes with that much fast memory."""
        return self.tiles_q[int(np.argmin(self.moved[fast_memory]))]


def draw_traffic_by_tile(
    ax: Axes, n: int, tiles_q: Sequence[int], tile_k: int, fast_memories: dict[int, str], *, head_dim: int = 64
) -> TileSweep:
    """Draw bytes moved against tile_q (causal, one head, fp16), a line per fast memory {bytes: name}; returns data.

    At most two fast memories. Filled markers fit the fast memory; open ones do not, and spill. A dotted line stands at
    the largest tile that fits.
    """
    sizes: dict[str, Any] = {
        "batch": 1,
        "q_len": n,
        "kv_len": n,
        "q_heads": 1,
        "kv_heads": 1,
        "head_dim": head_dim,
        "input_bytes": 2,
    }
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
        edge = data.largest_tile(fast)
        ax.axvline(edge, color=colour, linestyle=":", linewidth=1.5, zorder=1)
        ax.text(edge / 1.03, top, name, ha="right", va="top", size=9.5, color=colour)
    ax.axhline(data.naive, color=style.colour("naive"), label="naive")
    style.label_axis(ax, "x", "tile_q", unit=f"rows; tile_k = {tile_k}", kind="tokens", log=2, ticks=tiles_q)
    style.label_axis(ax, "y", "bytes moved", kind="bytes", log=2)
    ax.legend(loc="lower left")
    return data
