"""Attention chunk by chunk: Rabe and Staats' algorithm, with everything that may stand between scores and softmax.

"Self-attention does not need O(n²) memory", arXiv 2112.05682. Beside its result, a call holds the scores of one chunk
of queries against one chunk of keys, and a summary for each chunk of keys: q_chunk * (k_chunk + kv_len / k_chunk *
head_dim) numbers per head, the least of which is at k_chunk = sqrt(kv_len * head_dim). The paper counts head_dim as
a constant, and writes sqrt(n).
"""

from __future__ import annotations

import math
from typing import Literal, Unpack, overload

import torch

from vllm_teach.attention.chunk_summaries import ChunkedCall
from vllm_teach.attention.chunked_function import ChunkedAttention
from vllm_teach.attention.recomputing import check_differentiable
from vllm_teach.attention.shapes import AttentionShape, check_count, check_qkv, check_tensor
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError

_Q_CHUNK = 256
# With a pattern, keys come in chunks this small, so that more of what it hides lies in chunks that can be left out.
_PATTERN_K_CHUNK = 256


# fmt: off
@overload
def chunked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_chunk: int | None = ..., k_chunk: int | None = ...,
    bias: torch.Tensor | None = ..., return_lse: Literal[False] = ..., output_dtype: torch.dtype | None = ...,
    first_batch: int = ..., **variant: Unpack[VariantArguments],
) -> torch.Tensor: ...
@overload
def chunked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_chunk: int | None = ..., k_chunk: int | None = ...,
    bias: torch.Tensor | None = ..., return_lse: Literal[True], output_dtype: torch.dtype | None = ...,
    first_batch: int = ..., **variant: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def chunked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_chunk: int | None = None,
    k_chunk: int | None = None,
    bias: torch.Tensor | None = None,
    return_lse: bool = False,
    output_dtype: torch.dtype | None = None,
    first_batch: int = 0,
    **variant: Unpack[VariantArguments],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T * scale + bias) v, from independent summaries of chunks of keys that are merged once.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k `[batch, kv_len, kv_heads, head_dim]`, v like k but for its last
    size, which may differ and is the output's. `bias` is a float tensor of four dimensions that broadcasts to
    `[batch, q_heads, q_len, kv_len]`; it is added after softcap and ALiBi, and may hold -inf. `variant`: see
    `variant.Variant`. Sequence i of the batch takes dropout's mask of sequence `first_batch` + i.

    `q_chunk` is 256 by default; `k_chunk` about sqrt(kv_len * head_dim), and at most 256 with a pattern. Chunks that
    the pattern hides are left out, those that it shows in full are not masked.

    Returns out, of `output_dtype` or q's; with `return_lse` also the log-sum-exp of the scores
    `[batch, q_heads, q_len]`. A row that sees no key gives 0 and -inf. Both are differentiable, once, with respect to
    q, k, v and the bias; the backward pass computes each chunk again. Scores and sums are float32, or float64 for
    float64 input, also under autocast.

    Raises InvalidArgumentError when the arguments do not fit together, and for a derivative that this backward pass
    does not give: see `recomputing`.
    """
    shape = check_heads_and_values(q, k, v)
    checked = Variant.of(shape, q.device, **variant)
    if bias is not None:
        check_bias("bias", bias, (shape.batch, shape.q_heads, shape.q_len, shape.kv_len), q.device)
    check_differentiable(checked, q=q, k=k, v=v, bias=bias)
    call = ChunkedCall(
        shape=shape,
        variant=checked,
        q_chunk=_Q_CHUNK if q_chunk is None else check_count("q_chunk", q_chunk, 1),
        k_chunk=default_k_chunk(shape, checked) if k_chunk is None else check_count("k_chunk", k_chunk, 1),
        first_batch=check_count("first_batch", first_batch, 0),
        output_dtype=check_output_dtype(output_dtype, q.dtype),
    )
    out, lse = ChunkedAttention.apply(call, q, k, v, bias)
    return (out, lse) if return_lse else out


def default_k_chunk(shape: AttentionShape, variant: Variant) -> int:
    """Return sqrt(kv_len * head_dim), rounded up to a multiple of 64; at most 256 when a pattern may hide chunks."""
    even = 64 * max(1, math.ceil(math.sqrt(shape.kv_len * shape.head_dim) / 64))
    return even if variant.pattern is None else min(even, _PATTERN_K_CHUNK)


def check_heads_and_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionShape:
    """Return the sizes of q, k and v as `check_qkv` does, which asks for v of k's shape; here the last may differ."""
    for name, tensor in (("k", k), ("v", v)):
        check_tensor(name, tensor, " [batch, length, heads, head_dim]")
    if k.dim() == v.dim() == 4 and v.shape[:-1] == k.shape[:-1] and v.shape[-1] > 0:
        return check_qkv(q, k, v[..., :1].expand(k.shape))
    return check_qkv(q, k, v)


def check_bias(name: str, bias: torch.Tensor, wanted: tuple[int, ...], device: torch.device) -> None:
    """Raise InvalidArgumentError unless `bias`, the argument `name`, can be added to scores of shape `wanted`.

    Every size is that of the scores, or 1. Not fewer dimensions: of `[3, q_len, kv_len]` no one could tell whether
    the 3 counts sequences or heads.
    """
    check_tensor(name, bias, " of floats, or None")
    if not bias.dtype.is_floating_point:
        raise InvalidArgumentError(
            f"{name} has dtype {bias.dtype}; it is added to the scores: give a float tensor, 0 where a query sees a "
            "key and -inf where not."
        )
    if bias.dim() != len(wanted) or any(a not in (1, b) for a, b in zip(bias.shape, wanted, strict=True)):
        raise InvalidArgumentError(
            f"{name} has shape {list(bias.shape)} and the scores it is added to {list(wanted)}; each size of it must "
            "be that of the scores, or 1."
        )
    if bias.device != device:
        raise InvalidArgumentError(f"{name} is on {bias.device} and the scores on {device}; move it there.")


def check_output_dtype(output_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the output's dtype, for None `dtype`, that of q. Raises InvalidArgumentError unless it is a float's."""
    if output_dtype is None:
        return dtype
    if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point or output_dtype.itemsize < 2:
        raise InvalidArgumentError(
            f"output_dtype is {output_dtype!r}; give float16, bfloat16, float32, float64 or None for q's."
        )
    return output_dtype
