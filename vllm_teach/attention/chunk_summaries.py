"""The summary of one chunk of keys, and how the summaries of all chunks make the whole attention.

Rabe and Staats, "Self-attention does not need O(n²) memory", arXiv 2112.05682, section 3 and figure 1. A chunk of
queries meets every chunk of keys on its own. Of each meeting three things are kept: the largest score m, the sum l of
exp(score - m), and the sum acc of exp(score - m) * value. Only when all are there are they merged, once. FlashAttention
instead carries one state from tile to tile: it keeps less, but its tiles have to wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_teach.attention.dropout import keep_mask, number_heads
from vllm_teach.attention.online_softmax import SoftmaxState, finite
from vllm_teach.attention.scores import grouped_slopes, modify_scores
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.traffic import Span, tile_pairs
from vllm_teach.attention.variant import Variant


@dataclass(frozen=True)
class Chunk:
    """One chunk of queries against one chunk of keys; `kind`, a `TileKind`, says what the pattern shows of it."""

    rows: Span
    keys: Span
    kind: int


@dataclass(frozen=True, eq=False)
class ChunkedCall:
    """One attention call without its tensors. `shape.head_dim` is that of q and k; v may have another."""

    shape: AttentionShape
    variant: Variant
    q_chunk: int
    k_chunk: int
    first_batch: int
    output_dtype: torch.dtype

    def chunks(self) -> list[tuple[Span, list[Chunk]]]:
        """Return each chunk of queries with those chunks of keys that the pattern shows it something of."""
        pairs = tile_pairs(self.shape, self.variant.pattern, self.q_chunk, self.k_chunk)
        return [(rows, [Chunk(rows, keys, kind) for keys, kind in seen]) for rows, seen in pairs]


@dataclass(frozen=True, eq=False)
class Operands:
    """The pieces of q, k, v and the bias that meet in one chunk, in the dtype that is computed in.

    q `[batch, kv_heads, group, rows, head_dim]`, k `[batch, kv_heads, keys, head_dim]`, v
    `[batch, kv_heads, keys, value_dim]`, bias broadcasts to `[batch, kv_heads, group, rows, keys]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None


def chunk_scores(call: ChunkedCall, chunk: Chunk, x: Operands) -> torch.Tensor:
    """Return the scores that softmax sees, `[batch, kv_heads, group, rows, keys]`."""
    group, rows = x.q.shape[2:4]
    # The heads of a group lie under each other, so that no key is repeated for them.
    stacked = (x.q * call.variant.scale).flatten(2, 3)  # [batch, kv_heads, group * rows, head_dim]
    scores = (stacked @ x.k.transpose(-2, -1)).unflatten(2, (group, rows))
    slopes = grouped_slopes(call.variant.alibi_slopes, call.shape.kv_heads)
    offset = call.shape.causal_offset
    return modify_scores(scores, call.variant, slopes, chunk.rows, chunk.keys, offset, chunk.kind, x.bias)


def weigh(
    scores: torch.Tensor, shift: torch.Tensor, values: torch.Tensor, kept: torch.Tensor | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (l, acc): the sum of the weights exp(scores - shift), and the values' sum with these weights.

    `scores` are `[batch, kv_heads, group, rows, keys]`, `shift` and l `[batch, kv_heads, group, rows]`, `values`
    `[batch, kv_heads, keys, value_dim]`, acc `[batch, kv_heads, group, rows, value_dim]`. Dropout, of which `kept` is
    the mask, touches acc alone: the softmax's denominator is that of all weights.
    """
    group, rows = scores.shape[2:4]
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(dim=-1)
    if kept is not None:
        weights = weights.masked_fill(~kept, 0.0) / (1 - dropout_p)
    acc = weights.flatten(2, 3) @ values  # [batch, kv_heads, group * rows, value_dim]
    return total, acc.unflatten(2, (group, rows))


def summarise(call: ChunkedCall, chunk: Chunk, x: Operands) -> SoftmaxState:
    """Return the summary of one chunk of keys for one chunk of queries; rows are `[batch, kv_heads, group, rows]`."""
    scores = chunk_scores(call, chunk, x)
    m = scores.amax(dim=-1)
    total, acc = weigh(scores, finite(m), x.v, kept_pairs(call, chunk, x.q.device), call.variant.dropout_p)
    return SoftmaxState(m=m, l=total, acc=acc)


def merge_all(summaries: Sequence[SoftmaxState]) -> SoftmaxState:
    """Return the state of rows that have seen the keys of all `summaries`, at least one: figure 1's global maximum."""
    m = torch.stack([summary.m for summary in summaries]).amax(dim=0)
    shift = finite(m)
    total, acc = torch.zeros_like(m), torch.zeros_like(summaries[0].acc)
    for summary in summaries:
        weight = torch.exp(summary.m - shift)  # at most 1; 0 for a row that sees nothing of the chunk
        total += summary.l * weight
        acc.addcmul_(summary.acc, weight[..., None])
    return SoftmaxState(m=m, l=total, acc=acc)


def kept_pairs(call: ChunkedCall, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
    """Return what dropout keeps, bool `[batch, kv_heads, group, rows, keys]`; None when there is no dropout.

    The mask is a function of the seed and the indices, so the backward pass makes the same one again.
    """
    if not call.variant.dropout_p:
        return None
    s = call.shape
    batch_heads = number_heads(call.first_batch, s.batch, s.q_heads, device)
    kept = keep_mask(call.variant.dropout_seed, call.variant.dropout_p, batch_heads, chunk.rows, chunk.keys)
    return kept.unflatten(0, (s.batch, s.kv_heads, s.group))  # from [batch * q_heads, rows, keys]
