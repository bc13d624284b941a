"""Attention over a layout, one sequence at a time: for implementations that know dense batches only.

Right, and slow for many short sequences: what a varlen or paged kernel does in one launch is here a loop, and the
blocks of a paged cache are gathered into a copy for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Unpack

import torch

from vllm_teach.attention.layout import Layout, check_layout, each_sequence
from vllm_teach.attention.variant import Variant, VariantArguments


class DenseArguments(VariantArguments, total=False):
    """What a dense attention is called with: a variant, and the sequence's batch index where dropout needs it."""

    first_batch: int


class SequenceCall(NamedTuple):
    """One sequence of a layout as a dense batch of 1, and the arguments of its call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: DenseArguments


def sequence_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, **arguments: Unpack[VariantArguments]
) -> Iterator[SequenceCall]:
    """Yield, for each sequence of `layout`, the dense call that attends to it, with tensors `[1, length, heads, d]`.

    Only what depends on the sequence is replaced in `arguments`: of ALiBi slopes `[batch, q_heads]` its own row stays.
    With dropout, all calls get one seed, and `first_batch` is the sequence's index; without, there is no `first_batch`,
    so an attention that has no dropout need not know of it.

    Raises InvalidArgumentError, at the first step, when q, k, v, `layout` and `arguments` do not fit together.
    """
    sequences = check_layout(q, k, v, layout)
    variant = Variant.of(sequences.shape, q.device, **arguments)
    slopes = variant.alibi_slopes
    for index, (rows, keys, values) in enumerate(each_sequence(k, v, layout, sequences)):
        own: DenseArguments = {**arguments}
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[index]  # [q_heads]
        if variant.dropout_p:
            own |= {"dropout_seed": variant.dropout_seed, "first_batch": index}
        yield SequenceCall(q[rows][None], keys[None], values[None], own)


def attend_sequences(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the output, `[total_q, q_heads, head_dim]`, of calling `attend` for each sequence of `layout`.

    `attend(q, k, v, **arguments)` is an attention of dense batches, such as `naive_attention`, and gets what
    `sequence_calls` yields. A sequence may have no query, or no key: rows that see no key must give 0. Differentiable
    where `attend` is. Raises InvalidArgumentError when q, k, v, `layout` and `arguments` do not fit together.
    """
    outs = [attend(*call[:3], **call.arguments)[0] for call in sequence_calls(q, k, v, layout, **arguments)]
    return torch.cat([q[:0], *outs])  # q[:0]: there may be no sequence
