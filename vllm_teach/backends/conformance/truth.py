"""What a row's answer is: the textbook's formula in float64, and how far the plain one in the row's dtype is off."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Unpack

import torch

from vllm_teach.attention.dropout import keep_mask
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.conformance.packing import Sequence
from vllm_teach.backends.conformance.row import Row


class Answers(NamedTuple):
    """Outputs, and gradients of (q, k, v) where the row has them, for each sequence."""

    outs: list[torch.Tensor]
    grads: list[tuple[torch.Tensor, ...]]


@cache
def references(row: Row) -> tuple[Answers, Answers]:
    """Return the exact answer, and that of the plain formula in the row's dtype, for each sequence."""

    def plain(sequence: Sequence, index: int, **arguments: Unpack[VariantArguments]) -> torch.Tensor:
        slopes = arguments.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            arguments["alibi_slopes"] = slopes[index]
        return naive_attention(*(tensor[None] for tensor in sequence), first_batch=index, **arguments)[0]

    sequences = row.sequences()
    return (
        _answers(row, [Sequence(*(tensor.double() for tensor in one)) for one in sequences], formula),
        _answers(row, sequences, plain),
    )


def _answers(row: Row, sequences: list[Sequence], attend: Callable[..., torch.Tensor]) -> Answers:
    outs: list[torch.Tensor] = []
    grads: list[tuple[torch.Tensor, ...]] = []
    for index, (sequence, upstream) in enumerate(zip(sequences, row.upstream(), strict=True)):
        leaves = Sequence(*(tensor.detach().requires_grad_(row.has_gradients) for tensor in sequence))
        out = attend(leaves, index, **row.arguments())
        outs.append(out.detach())
        if row.has_gradients:
            grads.append(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))
    return Answers(outs, grads)


def formula(sequence: Sequence, index: int, **arguments: Unpack[VariantArguments]) -> torch.Tensor:
    """Return softmax(q k^T * scale) v of one sequence, `[q_len, q_heads, head_dim]`, as it is written in a textbook.

    `index` is the sequence's place in the batch, for dropout. Shares nothing with the implementations but the meaning
    of a pattern and the numbers of the dropout mask.
    """
    q, k, v = sequence
    (q_len, q_heads, head_dim), kv_len = q.shape, len(k)
    group = q_heads // k.shape[1]
    q_pos = torch.arange(q_len)[:, None] + kv_len - q_len
    k_pos = torch.arange(kv_len)[None, :]
    scale = arguments.get("scale")
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * (
        head_dim**-0.5 if scale is None else scale
    )
    if cap := arguments.get("softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
    if (slopes := arguments.get("alibi_slopes")) is not None:
        own = slopes if slopes.dim() == 1 else slopes[index]
        scores = scores - own[:, None, None].to(scores) * (q_pos - k_pos).abs()
    weights = scores.exp() * _visible(q_pos, k_pos, **arguments)
    total = weights.sum(dim=-1, keepdim=True)
    probs = torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0)
    if p := arguments.get("dropout_p", 0.0):
        heads = torch.arange(q_heads) + index * q_heads
        probs = probs * keep_mask(int(arguments["dropout_seed"] or 0), p, heads, (0, q_len), (0, kv_len)) / (1 - p)
    return torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(group, 1))


def _visible(q_pos: torch.Tensor, k_pos: torch.Tensor, **arguments: Unpack[VariantArguments]) -> torch.Tensor:
    left, right = arguments.get("window_size", (-1, -1))
    seen = torch.ones_like(q_pos - k_pos, dtype=torch.bool)
    if arguments.get("causal"):
        seen &= k_pos <= q_pos
    if left >= 0:
        seen &= k_pos >= q_pos - left
    if right >= 0:
        seen &= k_pos <= q_pos + right
    pattern = arguments.get("pattern")
    return seen if pattern is None else seen & pattern.sees(q_pos, k_pos)
