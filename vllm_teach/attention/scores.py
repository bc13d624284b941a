"""What stands between q k^T and the softmax, for one tile of scores: softcap, ALiBi, a bias, the mask.

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
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scores that softmax sees, `[batch, kv_heads, group, rows, keys]`, from q k^T * scale of that shape.

    `slopes` are the variant's as `[1 or batch, kv_heads, group, 1, 1]` (see `grouped_slopes`); `rows` and `keys` are
    the tile's (first, end) indices; `offset` is kv_len - q_len. `kind` FULL says that the pattern hides nothing here.
    `bias` is the tile of an additive bias, and broadcasts to the scores; what the pattern hides, it cannot show again.
    May change `scores` in place.
    """
    scores = soft_cap(scores, variant.softcap)
    return bias_and_mask(scores, variant, slopes, rows, keys, offset, kind, bias)


def bias_and_mask(
    scores: torch.Tensor,
    variant: Variant,
    slopes: torch.Tensor | None,
    rows: tuple[int, int],
    keys: tuple[int, int],
    offset: int,
    kind: int = TileKind.PARTIAL,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `modify_scores` does after softcap: a backward pass needs the scores in between."""
    scores = add_alibi(scores, slopes, rows, keys, offset)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if variant.pattern is not None and kind != TileKind.FULL:
        visible = variant.pattern.tile_mask(rows, keys, offset, scores.device)  # [rows, keys]
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(scores / cap), which is about the score near 0 and never beyond ±cap; the scores for cap 0."""
    return torch.tanh(scores / cap) * cap if cap else scores


def add_alibi(
    scores: torch.Tensor, slopes: torch.Tensor | None, rows: tuple[int, int], keys: tuple[int, int], offset: int
) -> torch.Tensor:
    """Return the scores `[…, rows, keys]` less slope * distance (ALiBi, arXiv 2108.12409); without slopes, the scores.

    `slopes` broadcast to `[…, 1, 1]`; `rows`, `keys` and `offset` are `modify_scores`'.
    """
    return scores if slopes is None else scores - slopes.to(scores.dtype) * distances(rows, keys, offset, scores)


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
