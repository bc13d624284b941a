"""FlashAttention's loop written in PyTorch: the memory of FlashAttention, at the speed of a Python loop."""

from typing import Unpack

import torch

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.spec import AttentionSpec

name = "tiled"


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
        return attend_sequences(flash_attention, q, k, v, layout, **arguments)
    return flash_attention(q, k, v, **arguments)
