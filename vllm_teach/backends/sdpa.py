"""PyTorch's scaled_dot_product_attention, which picks a fused kernel by itself, on CPUs and on GPUs."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_teach.attention.shapes import check_qkv, check_scale
from vllm_teach.backends.blind_rows import attend_seeing_rows
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import hiding_window, windowed_mask

name = "sdpa"


def unavailable() -> str | None:
    """It is part of PyTorch, so it always runs."""
    return None


def supports(spec: AttentionSpec) -> str | None:
    """It serves every call."""
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`. A NaN in v reaches the rows that it is hidden from too."""
    shape = check_qkv(q, k, v)
    scale = check_scale(scale, shape.head_dim)
    window = hiding_window(window, causal, shape.kv_len)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        is_causal, mask = _causal_arguments(rows.shape[1], shape.kv_len, window, q.device) if causal else (False, None)
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

    return attend_seeing_rows(attend, q, shape.kv_len, causal)


def _causal_arguments(
    q_len: int, kv_len: int, window: int | None, device: torch.device
) -> tuple[bool, torch.Tensor | None]:
    """Return SDPA's (is_causal, attn_mask) for a bottom-right causal mask; here q_len <= kv_len.

    SDPA's own is_causal is aligned top-left: it is right only for equal lengths. One query, the case of every decode
    step, is the last one and sees all keys, unless a window hides the first.
    """
    if window is not None:
        return False, windowed_mask(q_len, kv_len, window, device)
    if q_len == kv_len:
        return True, None
    if q_len == 1:
        return False, None
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)  # [q_len, kv_len]
    return False, visible.tril(diagonal=kv_len - q_len)
