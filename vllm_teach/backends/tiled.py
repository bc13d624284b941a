"""FlashAttention's loop written in PyTorch: the memory of FlashAttention, at the speed of a Python loop."""

import torch

from vllm_teach.attention.shapes import check_qkv
from vllm_teach.attention.tiled import flash_attention_forward
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import no_window, refuse_window

name = "tiled"


def unavailable() -> str | None:
    """It needs PyTorch alone, so it always runs."""
    return None


def supports(spec: AttentionSpec) -> str | None:
    """It serves every call but one with a sliding window."""
    return no_window(name, spec.window, spec.kv_len)


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
    refuse_window(name, window, causal, check_qkv(q, k, v).kv_len)
    return flash_attention_forward(q, k, v, causal=causal, scale=scale)[0]
