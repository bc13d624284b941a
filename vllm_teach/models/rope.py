"""Rotary position embedding (RoFormer, Su et al. 2021, section 3.2), with the linear and the Llama 3 scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vllm_teach.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair of channels: float32 `[head_dim // 2]`, on the CPU."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling["rope_type"] == "linear":
        return frequencies / config.rope_scaling["factor"]
    return _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow the waves that never turned fully in training, keep the fast ones, blend between (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    turns = trained * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / factor + keep * frequencies


class RotaryEmbedding:
    """Cosines and sines of every position's angles. Holds no weights, so it is no module and never on `meta`."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each `[tokens, 1, head_dim // 2]` in `dtype`; the angles are computed in float32."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = (positions.float()[:, None] * self._frequencies)[:, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim // 2) of `x` `[tokens, heads, head_dim]` by their angles.

    Hugging Face's pairing of the two halves; Llama's original code pairs neighbours (2i, 2i + 1), with the rows of the
    q and k projections permuted to match.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
