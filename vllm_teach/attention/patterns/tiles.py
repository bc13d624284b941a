"""Tiles of the attention matrix: how the two axes are cut, and what kind a tile is.

A tile's kind is found in one of three ways, from cheap to dear: from its corners (each pattern's `classify`), from the
diagonals that it covers (`classify_by_diagonal`), or by a look at all of its pairs (`look`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from vllm_teach.attention.patterns.base import Pattern

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# How many (query, key) pairs are looked at in one go: bounds the memory of a map over a long sequence.
_PAIRS_AT_ONCE = 1 << 20


def remembered(maxsize: int) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function of hashable arguments to keep its last `maxsize` results.

    Under `torch.inference_mode` it would make tensors that training refuses to save, and under a default device tensors
    on that device, and keep those: it leaves both.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with torch.inference_mode(False), torch.device("cpu"):
                return function(*args, **kwargs)

        cached: Any = lru_cache(maxsize)(run)
        return cached

    return decorate


class TileKind(IntEnum):
    """What a pattern leaves of one tile: nothing, some pairs, or all of them."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2
    UNKNOWN = 3  # only a pattern's `classify` says so: its `tile_map` then looks


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


def kinds(empty: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return int8 tile kinds from two bool maps that exclude each other; neither of them is PARTIAL."""
    return (full.to(torch.int8) - empty.to(torch.int8)) + int(TileKind.PARTIAL)


def opposite(of: torch.Tensor) -> torch.Tensor:
    """Return int8 kinds with EMPTY and FULL exchanged."""
    known = int(TileKind.FULL) - of
    return torch.where(of == TileKind.UNKNOWN, of, known)


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the int8 kinds of what two patterns both show. Two PARTIAL tiles may share no pair: UNKNOWN."""
    empty = (a == TileKind.EMPTY) | (b == TileKind.EMPTY)
    unclear = torch.where(empty, int(TileKind.EMPTY), int(TileKind.UNKNOWN)).to(torch.int8)
    return torch.where(a == TileKind.FULL, b, torch.where(b == TileKind.FULL, a, unclear))


def classify_by_diagonal(pattern: Pattern, queries: Spans, keys: Spans) -> torch.Tensor:
    """Return the exact int8 `[q tiles, k tiles]` kinds of a pattern that is constant along every diagonal k - q.

    A tile has a pair on each diagonal between its two corners', so counting the visible ones among them decides. The
    running count makes that two look-ups a tile.
    """
    lowest = keys.first[None, :] - queries.last[:, None]  # [q tiles, k tiles], the least k - q in the tile
    highest = keys.last[None, :] - queries.first[:, None]
    if lowest.numel() == 0:
        return lowest.to(torch.int8)
    start = int(lowest.min())
    seen = pattern.shown(torch.tensor(0), torch.arange(start, int(highest.max()) + 1))
    count = torch.nn.functional.pad(seen.cumsum(0), (1, 0))  # count[d] diagonals from `start` to before start + d
    within = count[highest + 1 - start] - count[lowest - start]
    return kinds(within == 0, within == highest + 1 - lowest)


def look(
    pattern: Pattern, tiles: torch.Tensor, q_len: int, kv_len: int, tile_q: int, tile_k: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Go through the pairs of `tiles`, int64 `[n, 2]` (query tile, key tile), in batches of bounded memory.

    Yields (visible, real), bool `[batch, tile_q, tile_k]`: what the pattern shows, and which pairs exist, as the last
    tile of an axis may be short. `visible` means nothing where `real` is False.
    """
    queries, keys = Spans.cut(q_len, tile_q, kv_len - q_len), Spans.cut(kv_len, tile_k, 0)
    size = max(1, _PAIRS_AT_ONCE // (tile_q * tile_k))
    for batch in tiles.split(size) if len(tiles) else ():
        q_pos = queries.first[batch[:, 0], None] + torch.arange(tile_q)  # [batch, tile_q]
        k_pos = keys.first[batch[:, 1], None] + torch.arange(tile_k)  # [batch, tile_k]
        q_last, k_last = queries.last[batch[:, 0], None], keys.last[batch[:, 1], None]  # [batch, 1]
        real = (q_pos <= q_last)[:, :, None] & (k_pos <= k_last)[:, None, :]
        # Missing rows and keys are clamped into the tile, so that no pattern meets a position out of range.
        q_pos, k_pos = torch.minimum(q_pos, q_last), torch.minimum(k_pos, k_last)
        yield pattern.shown(q_pos[:, :, None], k_pos[:, None, :]), real


def kinds_of_pairs(visible: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the int8 `[batch]` kinds of tiles that `look` has gone through."""
    full = (visible | ~real).flatten(1).all(dim=1)
    empty = ~(visible & real).flatten(1).any(dim=1)
    return kinds(empty, full)
