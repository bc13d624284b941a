"""What stands between q k^T and the softmax, for one tile of scores: softcap, ALiBi, the mask.

One definition, which the naive and the tiled forward use and every kernel is tested against.
"""

import torch

from vllm_teach.attention.patterns.base import TileKind
from vllm_teach.attention.variant import Variant


def modify_scores(
    scores: torch.Tensor,
    variant: Variant,
    slopes: torch.Tensor | None,
    rows: tuple[int, int],
    keys: tuple[int, int],
    offset: int,
    kind: int = TileKind.PARTIAL,
) -> torch.Tensor:
    """Return the scores that softmax sees, `[batch, kv_heads, group, rows, keys]`, from q k^T * scale of that shape.

    `slopes` are the variant's as `[1 or batch, kv_heads, group, 1, 1]` (see `grouped_slopes`); `rows` and `keys` are
    the tile's (first, end) indices; `offset` is kv_len - q_len. `kind` FULL says that the pattern hides nothing here.
    May change `scores` in place.
    """
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype) * distances(rows, keys, offset, scores)
    if variant.pattern is not None and kind != TileKind.FULL:
        visible = variant.pattern.tile_mask(rows, keys, offset, scores.device)  # [rows, keys]
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def distances(rows: tuple[int, int], keys: tuple[int, int], offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return |position of query - position of key|, `[rows, keys]`, in the dtype and on the device of `like`."""
    q_pos = torch.arange(*rows, device=like.device) + offset
    return (q_pos[:, None] - torch.arange(*keys, device=like.device)[None, :]).abs().to(like.dtype)


def grouped_slopes(slopes: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    """Return ALiBi slopes `[q_heads]` or `[batch, q_heads]` as `[1 or batch, kv_heads, group, 1, 1]`."""
    if slopes is None:
        return None
    rows = slopes if slopes.dim() == 2 else slopes[None]
    return rows.unflatten(1, (kv_heads, -1))[..., None, None]
