"""Rabe and Staats' chunked attention in PyTorch: its memory is bounded like the tiled one's, by another road."""

from typing import Unpack

import torch

from vllm_teach.attention.chunked import chunked_attention
from vllm_teach.attention.layout import Layout
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.spec import AttentionSpec

name = "memory_efficient"


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
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`."""
    if layout is not None:
        return attend_sequences(chunked_attention, q, k, v, layout, **arguments)
    return chunked_attention(q, k, v, **arguments)
