"""FlashAttention's loop written in PyTorch: the memory of FlashAttention, at the speed of a Python loop."""

import torch

from vllm_teach.attention.tiled import flash_attention_forward
from vllm_teach.backends.spec import AttentionSpec

name = "tiled"


def unavailable() -> str | None:
    """It needs PyTorch alone, so it always runs."""
    return None


def supports(spec: AttentionSpec) -> str | None:
    """It serves every call."""
    return None


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`."""
    return run_with_lse(q, k, v, causal=causal, scale=scale)[0]


def run_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse)."""
    return flash_attention_forward(q, k, v, causal=causal, scale=scale)
