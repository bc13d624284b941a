"""The formula with the whole score matrix in memory: slow, and always right."""

import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends.spec import AttentionSpec

name = "naive"


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
    return naive_attention(q, k, v, causal=causal, scale=scale)


def run_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse)."""
    out, lse = naive_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    return out, lse
