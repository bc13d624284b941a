"""FLOPs and bytes of one layer's attention over sequences of a step, counted as `attention.traffic` counts them.

    naive   the scores are written and read: S and P, each once
    tiled   each tile of queries reads the keys and values that it sees, once for each query head
    paged   the same, but the query heads that share a key head read it together, as kernels for paged caches do

A sequence with one token is the case of one query; for all of them together, a sum of keys is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_teach.errors import InvalidArgumentError

ALGORITHMS = ("naive", "tiled", "paged")
# Queries and keys of a tile, FlashAttention 2's choice for heads of 128 numbers on an A100 (Dao 2023).
TILE_Q, TILE_K = 128, 64
_STATISTIC = 4  # bytes of a row's log-sum-exp, float32


class Work(NamedTuple):
    """FLOPs, bytes moved between memory and processor, and how many calls of an operator make them."""

    flops: float = 0.0
    num_bytes: float = 0.0
    calls: int = 0


def check_algorithm(attention: str) -> None:
    """Raise InvalidArgumentError, listing all, unless `attention` is one of ALGORITHMS."""
    if attention not in ALGORITHMS:
        raise InvalidArgumentError(f"attention={attention!r} is not known: use one of {', '.join(ALGORITHMS)}.")


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's heads, `element_bytes` of a number in q, k, v and the cache, and its `window` of keys, if any."""

    algorithm: str
    q_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    window: int | None = None

    def singles(self, count: int, keys: int) -> tuple[float, float]:
        """Return (FLOPs, bytes) of `count` sequences with one query each, which see `keys` keys together."""
        heads, dim, size = self.q_heads, self.head_dim, self.element_bytes
        flops = 4.0 * heads * keys * dim
        if self.algorithm == "naive":
            return flops, 2.0 * heads * size * (count * dim + keys * dim + 2 * keys)
        readers = heads if self.algorithm == "tiled" else self.kv_heads
        return flops, 2.0 * size * dim * (readers * keys + heads * count) + _STATISTIC * heads * count

    def chunk(self, start: int, count: int) -> tuple[float, float]:
        """Return (FLOPs, bytes) of `count` queries of one sequence, which stand at positions `start` and up."""
        heads, dim, size = self.q_heads, self.head_dim, self.element_bytes
        if self.algorithm == "naive":
            pairs = count * (start + count)
            flops = 4.0 * heads * pairs * dim
            return flops, 2.0 * heads * size * (count * dim + (start + count) * dim + 2 * pairs)
        pairs, read = self._visited(start, count)
        readers = heads if self.algorithm == "tiled" else self.kv_heads
        moved = 2.0 * size * dim * (readers * read + heads * count) + _STATISTIC * heads * count
        return 4.0 * heads * pairs * dim, moved

    def _visited(self, start: int, count: int) -> tuple[int, int]:
        """Return (pairs, keys) of all visited tile pairs of one head: a tile that is masked in part is computed whole.

        A tile of queries sees the keys up to its last query, from the tile on in which its first query's window begins.
        """
        kv_len = start + count
        if self.window is None and count % TILE_Q == 0 and start % TILE_Q == 0:
            # Whole tiles: an arithmetic series. TILE_K divides TILE_Q, so that keys end with their tile.
            tiles = count // TILE_Q
            keys = tiles * start + TILE_Q * tiles * (tiles + 1) // 2
            return TILE_Q * keys, keys
        pairs = read = 0
        for first in range(0, count, TILE_Q):
            rows = min(TILE_Q, count - first)
            end = min(kv_len, -(-(start + first + rows) // TILE_K) * TILE_K)
            begin = 0 if self.window is None else max(0, start + first - self.window + 1) // TILE_K * TILE_K
            pairs += rows * (end - begin)
            read += end - begin
        return pairs, read
