"""The tiles that decoding sequences visit: of each attention matrix only the last row, and of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_teach.attention.patterns.base import Pattern, check_pattern
from vllm_teach.attention.patterns.tile_csr import TileCsr
from vllm_teach.attention.patterns.tiles import TileKind
from vllm_teach.attention.shapes import check_count


def last_rows(pattern: Pattern, kv_lens: Sequence[int], tile_q: int, tile_k: int) -> TileCsr:
    """Return the tiles of `pattern` for one query behind `kv_lens[i]` keys, for each i, as those of one matrix.

    Row i of the result is what `tile_csr(pattern, 1, kv_lens[i], tile_q, tile_k)` has as its only row. Every decoded
    token makes all lengths new, so nothing is remembered; instead a few operations serve all sequences together. They
    look at each key once, so memory is some dozens of bytes for each. Equal masks are kept more than once.

    Raises InvalidArgumentError when a length is negative, a tile not positive, or the pattern not defined here.
    """
    check_pattern(pattern)
    check_count("tile_q", tile_q, 1)
    check_count("tile_k", tile_k, 1)
    for kv_len in dict.fromkeys(kv_lens):
        pattern.check(1, kv_len)
    with torch.device("cpu"):
        lengths = torch.tensor(kv_lens, dtype=torch.int64)  # [sequences]
        counts = -(-lengths // tile_k)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)  # [tiles], the sequence of each
        k_tile = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
        q_pos = (lengths - 1)[owner, None]  # [tiles, 1]
        k_pos = k_tile[:, None] * tile_k + torch.arange(tile_k)  # [tiles, tile_k]
        real = k_pos <= q_pos
        # What is not there is taken for the last key, so that no pattern meets a position out of range.
        seen = pattern.shown(q_pos, torch.minimum(k_pos, q_pos)) & real
        visited, full = seen.any(1), (seen | ~real).all(1)
        row_ptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        row_ptr[1:] = torch.bincount(owner[visited], minlength=len(lengths)).cumsum(0)
        cut = ~full[visited]
        masks = torch.zeros(int(cut.sum()), tile_q, tile_k, dtype=torch.uint8)
        masks[:, 0] = seen[visited & ~full]
        return TileCsr(
            row_ptr=row_ptr,
            k_tile=k_tile[visited].to(torch.int32),
            kind=torch.where(cut, int(TileKind.PARTIAL), int(TileKind.FULL)).to(torch.int8),
            mask_index=torch.where(cut, cut.cumsum(0) - 1, -1).to(torch.int32),
            masks=masks,
        )
