"""What a pattern is: a rule that says which keys a query may see, asked for one pair, a mask or a map of tiles.

Positions, not indices: key j has position j, and query i of q_len has position i + kv_len - q_len, so that the last
query stands where the last key stands (bottom-right, as FlashAttention aligns its masks). A query may have a negative
position when there are more queries than keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch

from vllm_teach.attention.shapes import check_count

# How many (query, key) pairs are looked at in one go: bounds the memory of a map over a long sequence.
_PAIRS_AT_ONCE = 1 << 22


class TileKind(IntEnum):
    """What a pattern leaves of one tile: nothing, some pairs, or all of them."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True)
class Spans:
    """The tiles of one axis: `first` and `last` position of each, both inclusive, int64 `[tiles]`."""

    first: torch.Tensor
    last: torch.Tensor

    @classmethod
    def cut(cls, length: int, tile: int, offset: int) -> Spans:
        """Cut `length` positions, the first of which is `offset`, into tiles; the last one may be short."""
        first = torch.arange(0, length, tile)
        return cls(first + offset, torch.clamp(first + tile, max=length) - 1 + offset)

    def __len__(self) -> int:
        return len(self.first)


class Pattern(ABC):
    """Which keys a query may see. Immutable and hashable; combine patterns with `&`, `|` and `~`."""

    @abstractmethod
    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """Return, elementwise, whether a query at `q_pos` may see the key at `k_pos`.

        Both are int64 and broadcast against each other; the result is bool, of the broadcast shape, on their device.
        """

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Return what is known of each tile without looking at its pairs, int8 `[q tiles, k tiles]` of `TileKind`.

        EMPTY and FULL must be certain. PARTIAL means "look": `tile_map` goes through the pairs of such a tile.
        """
        return torch.full((len(queries), len(keys)), TileKind.PARTIAL, dtype=torch.int8)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """Raise InvalidArgumentError when the pattern is not defined for such lengths; most are for all."""

    def mask(self, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return bool `[q_len, kv_len]`, True where query i may see key j."""
        self._check(q_len, kv_len)
        return self.tile_mask((0, q_len), (0, kv_len), kv_len - q_len, device)

    def tile_mask(
        self, rows: tuple[int, int], keys: tuple[int, int], offset: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return bool `[rows, keys]` for the queries and keys from the first up to before the second index.

        `offset` is kv_len - q_len of the whole attention.
        """
        q_pos = torch.arange(*rows, device=device) + offset
        k_pos = torch.arange(*keys, device=device)
        return self.sees(q_pos[:, None], k_pos[None, :])

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> torch.Tensor:
        """Return the exact `TileKind` of each tile, int8 `[ceil(q_len / tile_q), ceil(kv_len / tile_k)]` on the CPU.

        An EMPTY tile has no visible pair and can be skipped; a FULL one hides none and needs no mask. The map is
        remembered, so do not change it.

        Raises InvalidArgumentError when a length is negative, a tile not positive, or the pattern not defined here.
        """
        self._check(q_len, kv_len)
        check_count("tile_q", tile_q, 1)
        check_count("tile_k", tile_k, 1)
        return _tile_map(self, int(q_len), int(kv_len), int(tile_q), int(tile_k))

    def density(self, q_len: int, kv_len: int) -> float:
        """Return the share of all q_len * kv_len pairs that are visible; 0 where there are none."""
        self._check(q_len, kv_len)
        if q_len == 0 or kv_len == 0:
            return 0.0
        rows_at_once = max(1, _PAIRS_AT_ONCE // kv_len)
        seen = 0
        for start in range(0, q_len, rows_at_once):
            rows = (start, min(start + rows_at_once, q_len))
            seen += int(self.tile_mask(rows, (0, kv_len), kv_len - q_len).sum())
        return seen / (q_len * kv_len)

    def _check(self, q_len: int, kv_len: int) -> None:
        check_count("q_len", q_len, 0)
        check_count("kv_len", kv_len, 0)
        self.check_lengths(q_len, kv_len)

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        return Hidden(self)


@dataclass(frozen=True)
class Both(Pattern):
    """`a & b`: the keys that both patterns show."""

    a: Pattern
    b: Pattern

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.a.sees(q_pos, k_pos) & self.b.sees(q_pos, k_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Two partial tiles may share no pair: that stays PARTIAL here, and `tile_map` looks."""
        return torch.minimum(self.a.classify(queries, keys), self.b.classify(queries, keys))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.a.check_lengths(q_len, kv_len)
        self.b.check_lengths(q_len, kv_len)


@dataclass(frozen=True)
class Either(Pattern):
    """`a | b`: the keys that at least one pattern shows."""

    a: Pattern
    b: Pattern

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.a.sees(q_pos, k_pos) | self.b.sees(q_pos, k_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Two partial tiles may make a full one together: that stays PARTIAL here, and `tile_map` looks."""
        return torch.maximum(self.a.classify(queries, keys), self.b.classify(queries, keys))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.a.check_lengths(q_len, kv_len)
        self.b.check_lengths(q_len, kv_len)


@dataclass(frozen=True)
class Hidden(Pattern):
    """`~a`: the keys that the pattern hides."""

    a: Pattern

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return ~self.a.sees(q_pos, k_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """EMPTY and FULL change places."""
        return TileKind.FULL - self.a.classify(queries, keys)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.a.check_lengths(q_len, kv_len)


@lru_cache(maxsize=256)
def _tile_map(pattern: Pattern, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> torch.Tensor:
    offset = kv_len - q_len
    queries, keys = Spans.cut(q_len, tile_q, offset), Spans.cut(kv_len, tile_k, 0)
    kinds = pattern.classify(queries, keys).clone()
    for tiles in _batches(torch.nonzero(kinds == TileKind.PARTIAL), max(1, _PAIRS_AT_ONCE // (tile_q * tile_k))):
        q_pos = queries.first[tiles[:, 0], None] + torch.arange(tile_q)  # [tiles, tile_q]
        k_pos = keys.first[tiles[:, 1], None] + torch.arange(tile_k)  # [tiles, tile_k]
        real = (q_pos <= queries.last[tiles[:, 0], None])[:, :, None] & (k_pos <= keys.last[tiles[:, 1], None])[:, None]
        # A short tile's missing rows and keys are clamped into it, so that no pattern meets a position out of range.
        q_pos = torch.minimum(q_pos, queries.last[tiles[:, 0], None])
        k_pos = torch.minimum(k_pos, keys.last[tiles[:, 1], None])
        visible = pattern.sees(q_pos[:, :, None], k_pos[:, None, :])  # [tiles, tile_q, tile_k]
        full = (visible | ~real).all(dim=2).all(dim=1)
        empty = ~(visible & real).any(dim=2).any(dim=1)
        found = torch.where(full, int(TileKind.FULL), torch.where(empty, int(TileKind.EMPTY), int(TileKind.PARTIAL)))
        kinds[tiles[:, 0], tiles[:, 1]] = found.to(torch.int8)
    return kinds


def _batches(tiles: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    yield from tiles.split(size) if len(tiles) else ()
