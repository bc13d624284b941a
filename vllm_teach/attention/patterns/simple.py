"""Patterns that are the same at every position: a rule on how far a key lies ahead of the query."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.patterns.base import DiagonalPattern
from vllm_teach.attention.shapes import LARGEST_COUNT, keep_count


@dataclass(frozen=True)
class LocalWindow(DiagonalPattern):
    """A query sees the `left` keys before its own position, its own, and the `right` keys after it; -1: all of them.

    This is FlashAttention's `window_size=(left, right)`, both inclusive. A window of w keys that includes the query's
    own, as xFormers and model configurations count, is `LocalWindow(w - 1, 0)`.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        keep_count(self, "left", -1)
        keep_count(self, "right", -1)

    def sees_ahead(self, ahead: torch.Tensor) -> torch.Tensor:
        """See `DiagonalPattern.sees_ahead`."""
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (ahead >= -self.left)
        if self.right >= 0:
            seen = seen & (ahead <= self.right)
        return seen


@dataclass(frozen=True)
class Causal(DiagonalPattern):
    """A query sees its own position and all before it: the mask of every autoregressive model."""

    def sees_ahead(self, ahead: torch.Tensor) -> torch.Tensor:
        """See `DiagonalPattern.sees_ahead`."""
        return ahead <= 0


@dataclass(frozen=True)
class Banded(DiagonalPattern):
    """A query sees its own position, and `width` keys on either side that lie `dilation` places apart.

    Key j is seen by query i when |j - i| <= width * dilation and j - i is a multiple of `dilation`: the dilated
    sliding window of Longformer (arXiv 2004.05150, section 3.1). With dilation 1 it is `LocalWindow(width, width)`.
    For text generation take `Banded(…) & Causal()`.
    """

    width: int
    dilation: int = 1

    def __post_init__(self) -> None:
        keep_count(self, "width", 0)
        keep_count(self, "dilation", 1)

    def sees_ahead(self, ahead: torch.Tensor) -> torch.Tensor:
        """See `DiagonalPattern.sees_ahead`."""
        reach = min(self.width * self.dilation, LARGEST_COUNT)
        return (ahead.abs() <= reach) & (ahead % self.dilation == 0)


@dataclass(frozen=True)
class Strided(DiagonalPattern):
    """A query sees every `stride`-th key, counted from its own position, on both sides.

    One of the two heads of the Sparse Transformer's strided attention (arXiv 1904.10509, section 4.3); the other one
    sees the last `stride` keys. In one pattern: `(Strided(s) | LocalWindow(s)) & Causal()`.
    """

    stride: int

    def __post_init__(self) -> None:
        keep_count(self, "stride", 1)

    def sees_ahead(self, ahead: torch.Tensor) -> torch.Tensor:
        """See `DiagonalPattern.sees_ahead`."""
        return ahead % self.stride == 0
