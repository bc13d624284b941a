"""Attention as the formula says it: softmax(Q K^T * scale) V, with the whole score matrix in memory.

In float64 this is the oracle that every faster implementation is tested against. In float16 and bfloat16 it is the
plain low-precision implementation: each step rounds to the input's dtype, and scores can overflow.
"""

from typing import Literal, overload

import torch

from vllm_teach import counters
from vllm_teach.attention.shapes import AttentionShape, check_qkv, check_scale
from vllm_teach.attention.traffic import naive_steps
from vllm_teach.errors import InvalidArgumentError


# fmt: off
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., scale: float | None = ...,
    mask: torch.Tensor | None = ..., return_lse: Literal[False] = ..., return_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., scale: float | None = ...,
    mask: torch.Tensor | None = ..., return_lse: Literal[True], return_probs: bool = ...,
) -> tuple[torch.Tensor, ...]: ...
@overload
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., scale: float | None = ...,
    mask: torch.Tensor | None = ..., return_lse: bool = ..., return_probs: Literal[True],
) -> tuple[torch.Tensor, ...]: ...
# fmt: on
def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return softmax(q k^T * scale) v, computed in the inputs' dtype with S and P materialised.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`; q_heads is a multiple
    of kv_heads, and query head h uses key/value head h // (q_heads // kv_heads). `scale` is 1/sqrt(head_dim) by
    default. `mask` is boolean, broadcasts to `[batch, q_heads, q_len, kv_len]`, and is True where a query may see a
    key; `causal` hides key j from query i when j > i + kv_len - q_len. A row that sees no key gives 0.
    A NaN in v reaches every row, those that it is hidden from too, as 0 · NaN is NaN.

    Returns out (q's shape); with `return_lse` also the log-sum-exp of the scores `[batch, q_heads, q_len]`, -inf for a
    row that sees no key; with `return_probs` also P `[batch, q_heads, q_len, kv_len]`, last.

    Raises InvalidArgumentError when the arguments do not fit together.
    """
    shape = check_qkv(q, k, v)
    scale = check_scale(scale, shape.head_dim)
    visible = _visible(shape, causal, mask, q.device)

    q_ = q.transpose(1, 2)  # [batch, q_heads, q_len, head_dim]
    k_ = k.repeat_interleave(shape.group, dim=2).transpose(1, 2)  # [batch, q_heads, kv_len, head_dim]
    v_ = v.repeat_interleave(shape.group, dim=2).transpose(1, 2)  # [batch, q_heads, kv_len, head_dim]

    scores = (q_ @ k_.transpose(-2, -1)) * scale  # S [batch, q_heads, q_len, kv_len]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1)  # P [batch, q_heads, q_len, kv_len]
    if visible is not None:
        # Softmax over nothing is 0/0. Only these rows are set: any other NaN is the input's, and must stay visible.
        blind = ~visible.any(dim=-1, keepdim=True)
        if blind.any():
            probs = probs.masked_fill(blind, 0.0)
    out = (probs @ v_).transpose(1, 2)  # [batch, q_len, q_heads, head_dim]
    _report(shape, q.element_size(), mask, return_lse)

    lse = (torch.logsumexp(scores, dim=-1),) if return_lse else ()  # [batch, q_heads, q_len]
    extras = (*lse, probs) if return_probs else lse
    return (out, *extras) if extras else out


def _visible(
    shape: AttentionShape, causal: bool, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Combine the two masks into one that broadcasts to `[batch, q_heads, q_len, kv_len]`; None: all is visible."""
    visible = None
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise InvalidArgumentError(f"mask is of type {type(mask).__name__}; give a bool tensor or None.")
        full = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
        fits = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(mask.shape[::-1], full[::-1], strict=False))
        if mask.dtype != torch.bool or not fits:
            raise InvalidArgumentError(
                f"mask has dtype {mask.dtype} and shape {list(mask.shape)}; it must be bool and broadcast to {full}."
            )
        if mask.device != device:
            raise InvalidArgumentError(f"mask is on {mask.device} and q on {device}; move one to the other.")
        visible = mask
    if causal:
        square = torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=device)
        lower = square.tril(diagonal=shape.causal_offset)  # bottom-right: the last query sees the last key
        visible = lower if visible is None else visible & lower
    return visible


def _report(shape: AttentionShape, input_bytes: int, mask: torch.Tensor | None, return_lse: bool) -> None:
    """Report the three steps, each reading from and writing to slow memory."""
    mask_bytes = 0 if mask is None else mask.numel()
    for name, step in naive_steps(shape, input_bytes, mask_bytes, return_lse).items():
        counters.report(name, **step)
