"""The tiles that a kernel visits, as flat arrays: the tile map row by row, without its EMPTY tiles (CSR)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_teach.attention.patterns.base import Pattern, check_pattern
from vllm_teach.attention.patterns.tiles import Spans, TileKind, look, remembered
from vllm_teach.errors import InvalidArgumentError

# A kernel's tiles have some thousands; each mask takes a byte a pair.
_MOST_PAIRS = 1 << 24


class TileCsr(NamedTuple):
    """Which tiles to visit, and the masks of those that are cut. On the CPU, contiguous; do not change them.

    The tiles of query tile i are the entries row_ptr[i] to before row_ptr[i + 1], with `k_tile` ascending.

    - `row_ptr`: int32 `[q_tiles + 1]`.
    - `k_tile`: int32 `[entries]`, the tile of keys.
    - `kind`: int8 `[entries]`, `TileKind` PARTIAL or FULL.
    - `mask_index`: int32 `[entries]`, which of `masks` cuts a PARTIAL tile; -1 for a FULL one.
    - `masks`: uint8 `[num_masks, tile_q, tile_k]`, 1 where the pair is visible; no two are equal.

    The last tile of an axis may be short. Its masks are 0 beyond the end, but a FULL tile says nothing of it: a kernel
    hides the keys from kv_len on itself.
    """

    row_ptr: torch.Tensor
    k_tile: torch.Tensor
    kind: torch.Tensor
    mask_index: torch.Tensor
    masks: torch.Tensor


def tile_csr(pattern: Pattern, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> TileCsr:
    """Return the tiles of `pattern` that are not EMPTY, and one copy of each mask that PARTIAL ones need.

    The last few results are remembered. Raises InvalidArgumentError as `Pattern.tile_map` does.
    """
    check_pattern(pattern)
    pattern.tile_map(q_len, kv_len, tile_q, tile_k)  # checks the arguments
    if tile_q * tile_k > _MOST_PAIRS:
        raise InvalidArgumentError(f"tile_q is {tile_q} and tile_k {tile_k}; a mask may have {_MOST_PAIRS} pairs.")
    return _tile_csr(pattern, int(q_len), int(kv_len), int(tile_q), int(tile_k))


# Few, because an irregular pattern's masks take a byte for each pair in a PARTIAL tile.
@remembered(8)
def _tile_csr(pattern: Pattern, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> TileCsr:
    kinds = pattern.tile_map(q_len, kv_len, tile_q, tile_k)  # [q_tiles, k_tiles]
    rows, k_tile = torch.nonzero(kinds, as_tuple=True)  # by row, then by key
    kind = kinds[rows, k_tile]
    row_ptr = torch.zeros(len(kinds) + 1, dtype=torch.int32)
    row_ptr[1:] = torch.bincount(rows, minlength=len(kinds)).cumsum(0)

    partial = kind == TileKind.PARTIAL
    tiles = torch.stack((rows[partial], k_tile[partial]), dim=1)  # [partial tiles, 2]
    alike, group = _groups(pattern, tiles, q_len, kv_len, tile_q, tile_k)
    index_of: dict[bytes, int] = {}
    found: list[int] = []
    for visible, real in look(pattern, tiles[alike], q_len, kv_len, tile_q, tile_k):
        masks = (visible & real).to(torch.uint8).numpy()
        found += [index_of.setdefault(mask.tobytes(), len(index_of)) for mask in masks]
    mask_index = torch.full((len(kind),), -1, dtype=torch.int32)
    mask_index[partial] = torch.tensor(found, dtype=torch.int32)[group]
    return TileCsr(row_ptr, k_tile.to(torch.int32), kind, mask_index, _stack(index_of, tile_q, tile_k))


def _groups(
    pattern: Pattern, tiles: torch.Tensor, q_len: int, kv_len: int, tile_q: int, tile_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of `tiles` to look at, one of each group whose masks must be equal, and the group of each tile.

    Tiles of one shape on one diagonal are alike when the pattern is constant along diagonals. Otherwise none are
    known to be, before their pairs are seen.
    """
    if not pattern.by_diagonal:
        return torch.arange(len(tiles)), torch.arange(len(tiles))
    queries, keys = Spans.cut(q_len, tile_q, kv_len - q_len), Spans.cut(kv_len, tile_k, 0)
    q_first, q_last = queries.first[tiles[:, 0]], queries.last[tiles[:, 0]]
    k_first, k_last = keys.first[tiles[:, 1]], keys.last[tiles[:, 1]]
    look_alike = torch.stack((k_first - q_first, q_last - q_first, k_last - k_first), dim=1)  # [tiles, 3]
    groups, group = torch.unique(look_alike, dim=0, return_inverse=True)
    one_of = torch.empty(len(groups), dtype=torch.int64)
    one_of[group] = torch.arange(len(tiles))
    return one_of, group


def _stack(masks: dict[bytes, int], tile_q: int, tile_k: int) -> torch.Tensor:
    joined = bytearray().join(masks)  # in the order of their indices
    flat = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return flat.view(-1, tile_q, tile_k)
