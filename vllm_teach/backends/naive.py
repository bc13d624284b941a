"""The formula with the whole score matrix in memory: slow, and always right."""

from typing import Unpack

import torch

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.spec import AttentionSpec

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
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`."""
    if layout is not None:
        return attend_sequences(naive_attention, q, k, v, layout, **arguments)
    return naive_attention(q, k, v, **arguments)
