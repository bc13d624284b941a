"""What the tiled forward and backward do to a tile alike: stack its heads, shape its scores, drop some of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.dropout import keep_mask, number_heads
from vllm_teach.attention.scores import bias_and_mask, grouped_slopes, modify_scores
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.traffic import Span
from vllm_teach.attention.variant import Variant


def stack_groups(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Put the query heads that share a key head under each other, so that no key is ever repeated.

    `[batch, rows, q_heads, head_dim]` -> `[batch, kv_heads, group * rows, head_dim]`; the heads of a group follow one
    another, each with all its rows.
    """
    return group_heads(rows, shape).flatten(2, 3)


def unstack_groups(tile: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Undo `stack_groups`: `[batch, kv_heads, group * rows, head_dim]` -> `[batch, rows, q_heads, head_dim]`."""
    return ungroup_heads(tile.unflatten(2, (shape.group, -1)))  # of [batch, kv_heads, group, rows, head_dim]


def group_heads(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """`[batch, rows, q_heads, head_dim]` -> `[batch, kv_heads, group, rows, head_dim]`, a view."""
    split = rows.unflatten(2, (shape.kv_heads, shape.group))  # [batch, rows, kv_heads, group, head_dim]
    return split.permute(0, 2, 3, 1, 4)


def ungroup_heads(grouped: torch.Tensor) -> torch.Tensor:
    """Undo `group_heads`."""
    return grouped.permute(0, 3, 1, 2, 4).flatten(2, 3)  # from [batch, rows, kv_heads, group, head_dim]


@dataclass(frozen=True, eq=False)
class ScoreTiles:
    """One call's variant, ready to be applied to tiles of scores `[batch, kv_heads, group * rows, keys]`."""

    shape: AttentionShape
    variant: Variant
    slopes: torch.Tensor | None  # [1 or batch, kv_heads, group, 1, 1]
    batch_heads: torch.Tensor  # int64 [batch * q_heads], what dropout calls each of them

    @classmethod
    def of(cls, shape: AttentionShape, variant: Variant, device: torch.device, first_batch: int) -> ScoreTiles:
        """Prepare a call whose first sequence is number `first_batch` in the dropout mask."""
        batch_heads = number_heads(first_batch, shape.batch, shape.q_heads, device)
        return cls(shape, variant, grouped_slopes(variant.alibi_slopes, shape.kv_heads), batch_heads)

    def modify(self, scores: torch.Tensor, rows: Span, keys: Span, kind: int) -> torch.Tensor:
        """Return the scores that softmax sees, from those of q k^T * scale; see `scores.modify_scores`."""
        split = scores.unflatten(2, (self.shape.group, -1))  # [batch, kv_heads, group, rows, keys]
        offset = self.shape.causal_offset
        return modify_scores(split, self.variant, self.slopes, rows, keys, offset, kind).flatten(2, 3)

    def bias_and_mask(self, scores: torch.Tensor, rows: Span, keys: Span, kind: int) -> torch.Tensor:
        """Do the part of `modify` that comes after softcap."""
        split = scores.unflatten(2, (self.shape.group, -1))  # [batch, kv_heads, group, rows, keys]
        offset = self.shape.causal_offset
        return bias_and_mask(split, self.variant, self.slopes, rows, keys, offset, kind).flatten(2, 3)

    def keep(self, rows: Span, keys: Span) -> torch.Tensor | None:
        """Return what dropout keeps of a tile, bool, shaped like its scores; None without dropout."""
        if not self.variant.dropout_p:
            return None
        kept = keep_mask(self.variant.dropout_seed, self.variant.dropout_p, self.batch_heads, rows, keys)
        # [batch * q_heads, rows, keys]: a batch's heads lie group by group, as stack_groups puts them.
        stacked = self.shape.group * (rows[1] - rows[0])  # not -1, which could be anything in a batch of 0
        return kept.view(self.shape.batch, self.shape.kv_heads, stacked, keys[1] - keys[0])
