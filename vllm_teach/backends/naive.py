"""The formula with the whole score matrix in memory: slow, and always right."""

import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.shapes import check_qkv
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import hiding_window, windowed_mask

name = "naive"


def unavailable() -> str | None:
    """It needs PyTorch alone, so it always runs."""
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
    """Return the attention output; see `spec.Backend.run`."""
    shape = check_qkv(q, k, v)
    window = hiding_window(window, causal, shape.kv_len)
    mask = None if window is None else windowed_mask(shape.q_len, shape.kv_len, window, q.device)
    return naive_attention(q, k, v, causal=causal, scale=scale, mask=mask)
