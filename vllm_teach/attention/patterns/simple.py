"""Patterns that a rule on two positions describes: causal, local window, and what is like them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.patterns.base import Pattern, Spans, TileKind
from vllm_teach.errors import InvalidArgumentError


def kinds(empty: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return int8 tile kinds from two bool maps that exclude each other; neither of them is PARTIAL."""
    return torch.where(empty, int(TileKind.EMPTY), torch.where(full, int(TileKind.FULL), int(TileKind.PARTIAL))).to(
        torch.int8
    )


@dataclass(frozen=True)
class LocalWindow(Pattern):
    """A query sees the `left` keys before its own position, its own, and the `right` keys after it; -1: all of them.

    This is FlashAttention's `window_size=(left, right)`, both inclusive. A window of w keys that includes the query's
    own, as xFormers and model configurations count, is `LocalWindow(w - 1, 0)`.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if isinstance(value, bool) or not isinstance(value, int) or value < -1:
                raise InvalidArgumentError(f"{name} is {value!r}; give how many keys are seen there, or -1 for all.")

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        ahead = k_pos - q_pos
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.left >= 0:
            seen &= ahead >= -self.left
        if self.right >= 0:
            seen &= ahead <= self.right
        return seen

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Exact: a tile's pairs lie between its two corners on the diagonals k - q."""
        lowest = keys.first[None, :] - queries.last[:, None]  # the least k - q in the tile
        highest = keys.last[None, :] - queries.first[:, None]
        empty = torch.zeros_like(lowest, dtype=torch.bool)
        full = ~empty
        if self.left >= 0:
            empty, full = empty | (highest < -self.left), full & (lowest >= -self.left)
        if self.right >= 0:
            empty, full = empty | (lowest > self.right), full & (highest <= self.right)
        return kinds(empty, full)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query sees its own position and all before it: the mask of every autoregressive model."""

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return k_pos <= q_pos

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Exact: see `LocalWindow.classify`."""
        return LocalWindow(-1, 0).classify(queries, keys)
