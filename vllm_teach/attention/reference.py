"""Attention as the formula says it: softmax(Q K^T * scale) V, with the whole score matrix in memory.

In float64 this is the oracle that every faster implementation is tested against, and autograd through it the oracle of
their gradients. In float16 and bfloat16 it is the plain low-precision implementation: each step rounds to the input's
dtype, and scores can overflow.
"""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch

from vllm_teach import counters
from vllm_teach.attention.autocast import without_autocast
from vllm_teach.attention.dropout import keep_mask, number_heads
from vllm_teach.attention.scores import add_alibi, soft_cap
from vllm_teach.attention.shapes import AttentionShape, check_count, check_qkv, check_tensor
from vllm_teach.attention.traffic import naive_steps
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError


# fmt: off
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = ...,
    return_lse: Literal[False] = ..., return_probs: Literal[False] = ..., first_batch: int = ...,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor: ...
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = ...,
    return_lse: Literal[True], return_probs: bool = ..., first_batch: int = ..., **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, ...]: ...
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = ...,
    return_lse: bool = ..., return_probs: Literal[True], first_batch: int = ..., **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, ...]: ...
# fmt: on
@without_autocast
def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    first_batch: int = 0,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return softmax(q k^T * scale) v, computed in the inputs' dtype, under autocast too, with S and P materialised.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`; q_heads is a multiple
    of kv_heads, and query head h uses key/value head h // (q_heads // kv_heads). `arguments` are those of `Variant`:
    causal, scale, window_size, pattern, softcap, alibi_slopes, dropout_p, dropout_seed. `mask` is boolean, broadcasts
    to `[batch, q_heads, q_len, kv_len]`, and is True where a query may see a key; a pair must be visible in it and in
    the pattern. A row that sees no key gives 0, and its gradients are 0. A NaN in v reaches every row, those that it
    is hidden from too, as 0 · NaN is NaN. `first_batch` is the batch index of the first sequence in the dropout mask,
    for callers that cut a batch up.

    Returns out (q's shape); with `return_lse` also the log-sum-exp of the scores `[batch, q_heads, q_len]`, -inf for a
    row that sees no key; with `return_probs` also P `[batch, q_heads, q_len, kv_len]`, last, as it meets v: after
    dropout. Autograd differentiates all of them.

    Raises InvalidArgumentError when the arguments do not fit together.
    """
    shape = check_qkv(q, k, v)
    variant = Variant.of(shape, q.device, **arguments)
    check_count("first_batch", first_batch, 0)
    visible = _visible(shape, variant, mask, q.device)

    q_ = q.transpose(1, 2)  # [batch, q_heads, q_len, head_dim]
    k_ = k.repeat_interleave(shape.group, dim=2).transpose(1, 2)  # [batch, q_heads, kv_len, head_dim]
    v_ = v.repeat_interleave(shape.group, dim=2).transpose(1, 2)  # [batch, q_heads, kv_len, head_dim]

    scores = (q_ @ k_.transpose(-2, -1)) * variant.scale  # S [batch, q_heads, q_len, kv_len]
    scores = _cap_and_alibi(scores, variant, shape)  # the same scores, unless asked for
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1)  # P [batch, q_heads, q_len, kv_len]
    if visible is not None:
        # Softmax over nothing is 0/0. Only these rows are set: any other NaN is the input's, and must stay visible.
        blind = ~visible.any(dim=-1, keepdim=True)
        if blind.any():
            probs = probs.masked_fill(blind, 0.0)
    if variant.dropout_p:
        probs = _drop(probs, variant, first_batch)
    out = (probs @ v_).transpose(1, 2)  # [batch, q_len, q_heads, head_dim]
    _report(shape, q.element_size(), mask, return_lse)

    lse = (torch.logsumexp(scores, dim=-1),) if return_lse else ()  # [batch, q_heads, q_len]
    extras = (*lse, probs) if return_probs else lse
    return (out, *extras) if extras else out


def _cap_and_alibi(scores: torch.Tensor, variant: Variant, shape: AttentionShape) -> torch.Tensor:
    slopes = variant.alibi_slopes  # [q_heads] or [batch, q_heads]
    slopes = None if slopes is None else slopes[..., None, None]  # broadcasts to the scores
    whole = (0, shape.q_len), (0, shape.kv_len)
    return add_alibi(soft_cap(scores, variant.softcap), slopes, *whole, shape.causal_offset)


def _drop(probs: torch.Tensor, variant: Variant, first_batch: int) -> torch.Tensor:
    """Return P after dropout: each probability 0 or divided by 1 - p."""
    batch, q_heads, q_len, kv_len = probs.shape
    batch_heads = number_heads(first_batch, batch, q_heads, probs.device)
    keep = keep_mask(variant.dropout_seed, variant.dropout_p, batch_heads, (0, q_len), (0, kv_len))
    return probs * keep.view_as(probs) / (1 - variant.dropout_p)  # keep was [batch * q_heads, q_len, kv_len]


def _visible(
    shape: AttentionShape, variant: Variant, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Combine the mask and the pattern into one that broadcasts to `[batch, q_heads, q_len, kv_len]`; None: see all."""
    if mask is not None:
        _check_mask(mask, shape, device)
    if variant.pattern is None:
        return mask
    pattern = variant.pattern.mask(shape.q_len, shape.kv_len, device)  # [q_len, kv_len]
    return pattern if mask is None else mask & pattern


def _check_mask(mask: torch.Tensor, shape: AttentionShape, device: torch.device) -> None:
    check_tensor("mask", mask, " of booleans, or None")
    full = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    fits = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(mask.shape[::-1], full[::-1], strict=False))
    if mask.dtype != torch.bool or not fits:
        raise InvalidArgumentError(
            f"mask has dtype {mask.dtype} and shape {list(mask.shape)}; it must be bool and broadcast to {full}."
        )
    if mask.device != device:
        raise InvalidArgumentError(f"mask is on {mask.device} and q on {device}; move one to the other.")


def _report(shape: AttentionShape, input_bytes: int, mask: torch.Tensor | None, return_lse: bool) -> None:
    """Report the three steps, each reading from and writing to slow memory."""
    mask_bytes = 0 if mask is None else mask.numel()
    for name, step in naive_steps(shape, input_bytes, mask_bytes, return_lse).items():
        counters.report(name, **step)
