"""xFormers' `memory_efficient_attention`, by its names and meaning, on any device, computed by `chunked_attention`.

xFormers (https://github.com/facebookresearch/xformers) made the paper's idea into CUDA kernels, and gave it this
interface. Its own attention has had no CPU path since version 0.0.22.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from vllm_teach.attention.attn_bias.base import AttentionBias
from vllm_teach.attention.attn_bias.sequences import SequenceBias
from vllm_teach.attention.attn_bias.triangular import LowerTriangularMaskWithTensorBias, PatternBias
from vllm_teach.attention.chunked import check_output_dtype, chunked_attention
from vllm_teach.attention.dropout import check_dropout, check_probability
from vllm_teach.attention.memory_efficient_inputs import (
    bias_over_heads,
    check_inputs,
    heads_apart,
    heads_together,
    score_shape,
)
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.shapes import compute_dtype
from vllm_teach.errors import InvalidArgumentError

Bias = torch.Tensor | AttentionBias | Pattern | None


class ChunkedArguments(TypedDict):
    """What all sequences of a call have in common."""

    scale: float | None
    dropout_p: float
    dropout_seed: int
    output_dtype: torch.dtype


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return dropout(softmax(query key^T * scale + attn_bias), p) value, in memory linear in the length.

    Shapes, of three kinds, the three tensors of the same kind:

    - `[batch, length, heads, head_dim]`; value's head_dim, which is the output's, may differ from key's.
    - `[batch, length, groups, heads, head_dim]`: key and value with their heads expanded (stride 0) are grouped heads,
      and are not repeated: `key[:, :, :, None].expand(-1, -1, -1, heads, -1)`. Nothing is broadcast by itself. The
      gradient of what was expanded is right; of the expanded view itself, head 0 gets that of all its group.
    - `[batch, length, head_dim]`: one head.

    `attn_bias` is one of:

    - a float tensor that is added to the scores, `[batch, heads, q_len, kv_len]` (with groups: `[batch, groups, heads,
      q_len, kv_len]`; without heads: `[batch, q_len, kv_len]`), each size that of the scores or 1. A gradient flows
      into it, as large as the tensor given: do not expand a size of 1 that is to be learnt.
    - a bias of `attention.attn_bias`: what it hides is not computed.
    - a pattern of `attention.patterns`, such as BlockSparsePattern. xFormers takes none.

    `p` is the probability of dropout, from 0 up to, but not, 1; the seed is drawn from PyTorch's default generator, so
    that torch.manual_seed repeats it. `scale` is 1/sqrt(head_dim) for None. `op` must be None: there is one
    implementation here. `output_dtype` is query's for None.

    Differentiable, once. A query that sees no key gives 0. Raises InvalidArgumentError when the arguments do not fit
    together.
    """
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `memory_efficient_attention` of the same arguments, cut off from autograd."""
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), lse the log-sum-exp of the scores `[batch, heads, q_len]`, or `[batch, groups, heads, q_len]`.

    Despite the name both are cut off from autograd, as in xFormers. lse is float32, or float64 for float64 input.

    Raises InvalidArgumentError as `memory_efficient_attention` does, and for a `p` other than 0.
    """
    refuse_dropout(p)
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)


def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) over some of the keys, for `merge_attentions` to merge with those over the others.

    out is float32 unless `output_dtype` says otherwise (float64 for float64 input), so that rounding happens once,
    after the merge. Both are differentiable; xFormers' are not. The shape of lse: `..._forward_requires_grad`.

    Raises InvalidArgumentError as `memory_efficient_attention` does, and for a `p` other than 0.
    """
    refuse_dropout(p)
    if output_dtype is None and isinstance(query, torch.Tensor) and query.dtype != torch.float64:
        output_dtype = torch.float32
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)


def refuse_dropout(p: float) -> None:
    """Raise InvalidArgumentError for a `p` other than 0: a part's mask would not be that of the whole."""
    if check_probability("p", p) != 0:
        raise InvalidArgumentError(f"p is {p!r}; only memory_efficient_attention itself has dropout: leave p at 0.")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias,
    p: float,
    scale: float | None,
    op: None,
    output_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), both differentiable, in the shapes that the callers promise."""
    if op is not None:
        raise InvalidArgumentError(
            f"op is {op!r}; leave it None: there is one implementation here, and vllm_teach.backends has the others."
        )
    check_inputs(query, key, value)
    p = check_probability("p", p)
    arguments: ChunkedArguments = {
        "scale": scale,
        "dropout_p": p,
        "dropout_seed": check_dropout(p, None),  # one for all sequences; each has its own index in the counter
        "output_dtype": check_output_dtype(output_dtype, query.dtype),
    }
    q, k, v = heads_together(query, key, value)
    if isinstance(attn_bias, SequenceBias):
        out, lse = _attend_sequences(q, k, v, attn_bias, arguments)
    else:
        pattern, tensor = _pattern_and_tensor(attn_bias, query, key)
        out, lse = chunked_attention(q, k, v, pattern=pattern, bias=tensor, return_lse=True, **arguments)
    return heads_apart(out, lse, query)


def _attend_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: SequenceBias, arguments: ChunkedArguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence of `bias`; q, k and v are `[1, tokens, heads, head_dim]`."""
    if q.shape[0] != 1:
        raise InvalidArgumentError(
            f"query has batch size {q.shape[0]} and attn_bias is a {type(bias).__name__}; lay the sequences behind one "
            "another, in a batch of 1."
        )
    bias.check_queries("query", q.shape[1])
    bias.check_keys("key", k.shape[1])
    pieces = zip(bias.q_seqinfo.pieces(q), bias.keys_of_each(k), bias.keys_of_each(v), strict=True)
    results = []
    for i, (q_i, k_i, v_i) in enumerate(pieces):
        pattern = bias.block_pattern(q_i.shape[1], k_i.shape[1])
        results.append(chunked_attention(q_i, k_i, v_i, pattern=pattern, first_batch=i, return_lse=True, **arguments))
    if not results:
        return chunked_attention(q, k, v, return_lse=True, **arguments)  # of no queries
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _pattern_and_tensor(
    attn_bias: Bias, query: torch.Tensor, key: torch.Tensor
) -> tuple[Pattern | None, torch.Tensor | None]:
    """Return what the bias hides and what it adds, as `[batch, heads, q_len, kv_len]` but for sizes of 1."""
    shape = score_shape(query, key)
    if attn_bias is None or isinstance(attn_bias, Pattern):
        return attn_bias, None
    if isinstance(attn_bias, torch.Tensor):
        return None, bias_over_heads(attn_bias, shape, query.device)
    if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        return attn_bias.pattern(*shape[-2:]), bias_over_heads(attn_bias.bias, shape, query.device)
    if isinstance(attn_bias, PatternBias):
        return attn_bias.pattern(*shape[-2:]), None
    if isinstance(attn_bias, AttentionBias):
        written_out = attn_bias.materialize(shape, compute_dtype(query), query.device)
        return None, bias_over_heads(written_out, shape, query.device)
    shown = f"the class {attn_bias.__name__}" if isinstance(attn_bias, type) else f"of type {type(attn_bias).__name__}"
    raise InvalidArgumentError(
        f"attn_bias is {shown}; give a tensor, an object of a class of vllm_teach.attention.attn_bias, a Pattern of "
        "vllm_teach.attention.patterns, or None."
    )
