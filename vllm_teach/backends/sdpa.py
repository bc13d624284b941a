"""PyTorch's scaled_dot_product_attention, which picks a fused kernel by itself, on CPUs and on GPUs.

Its kernels know two masks, causal and none. Any other is handed over as a tensor of q_len * kv_len elements (with
ALiBi, of q_heads times as many): the result is right, but memory grows with n² and hidden keys are computed as well.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.patterns.band import EVERYTHING
from vllm_teach.attention.scores import distances
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.bands import CAUSAL, Band, attend_seeing_rows, band_of, blind_rows, nothing_seen
from vllm_teach.backends.call import check_call
from vllm_teach.backends.spec import AttentionSpec

name = "sdpa"


def unavailable() -> str | None:
    """It is part of PyTorch, so it always runs."""
    return None


def supports(spec: AttentionSpec) -> str | None:
    """It serves every call without softcap and without dropout."""
    if spec.softcap:
        return f"sdpa has no softcap, and the call's is {spec.softcap:g}."
    if spec.dropout:
        return "sdpa draws its dropout mask from PyTorch's generator, and dropout_seed asks for the one it names."
    return None


def needs_dense_mask(spec: AttentionSpec) -> bool:
    """Return whether such a call makes sdpa compute all pairs, with a mask of n² elements: memory is that of naive."""
    return spec.alibi or band_of(spec.pattern, spec.q_len, spec.kv_len) not in (EVERYTHING, CAUSAL)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`. A NaN in v reaches the rows that it is hidden from too."""
    call = check_call(supports, q, k, v, layout, **arguments)
    if layout is not None:
        return attend_sequences(_attend, q, k, v, layout, **arguments)
    return _attend_checked(q, k, v, *call)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Unpack[VariantArguments]) -> torch.Tensor:
    return _attend_checked(q, k, v, *check_call(supports, q, k, v, None, **arguments))


def _attend_checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape, variant: Variant
) -> torch.Tensor:
    band = band_of(variant.pattern, shape.q_len, shape.kv_len)
    scale = variant.scale
    if scale <= 0:  # its CPU kernel masks with -inf and scales afterwards: -inf * scale would be inf or NaN
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)

    def attend(rows: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
        out = scaled_dot_product_attention(
            rows.transpose(1, 2),  # [batch, q_heads, rows, head_dim], the layout that SDPA wants
            k.transpose(1, 2),  # [batch, kv_heads, kv_len, head_dim]
            v.transpose(1, 2),  # [batch, kv_heads, kv_len, head_dim]
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=shape.group > 1,
        )
        return out.transpose(1, 2)  # [batch, rows, q_heads, head_dim]

    if variant.alibi_slopes is None and band in (EVERYTHING, CAUSAL):
        blind = blind_rows(band, shape.q_len, shape.kv_len)
        arguments = _causal_arguments(shape.q_len - blind, shape.kv_len, band, q.device)
        return attend_seeing_rows(lambda rows: attend(rows, *arguments), q, k, v, blind)
    if q.numel() == 0 or shape.kv_len == 0:
        return nothing_seen(q, k, v)
    visible, added = _dense_mask(shape, variant, q)
    seeing = visible.any(dim=1)  # [q_len]
    out = torch.zeros_like(q)
    out[:, seeing] = attend(q[:, seeing], added[..., seeing, :], False)
    return out


def _causal_arguments(q_len: int, kv_len: int, band: Band, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """Return SDPA's (attn_mask, is_causal) for a bottom-right causal mask or none; here q_len <= kv_len.

    SDPA's own is_causal is aligned top-left: it is right only for equal lengths. For CUDA the other alignment has an
    object of its own, which becomes a kernel's argument; on a CPU that would be the same dense mask.
    """
    if band == EVERYTHING:
        return None, False
    if q_len == kv_len:
        return None, True
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch.compile, which takes seconds

        return causal_lower_right(q_len, kv_len), False
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)  # [q_len, kv_len]
    return visible.tril(diagonal=kv_len - q_len), False


def _dense_mask(shape: AttentionShape, variant: Variant, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool `[q_len, kv_len]`, True where a query sees a key, and SDPA's mask: that one, or ALiBi added to it."""
    everything = torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=q.device)
    visible = variant.pattern.mask(shape.q_len, shape.kv_len, q.device) if variant.pattern is not None else everything
    if variant.alibi_slopes is None:
        return visible, visible
    slopes = variant.alibi_slopes if variant.alibi_slopes.dim() == 2 else variant.alibi_slopes[None]
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype  # what kernels take
    pairs = torch.empty((), dtype=dtype, device=q.device)
    distance = distances((0, shape.q_len), (0, shape.kv_len), shape.causal_offset, pairs)
    bias = -slopes[..., None, None].to(dtype) * distance  # [1 or batch, q_heads, q_len, kv_len]
    return visible, bias.masked_fill(~visible, float("-inf"))
