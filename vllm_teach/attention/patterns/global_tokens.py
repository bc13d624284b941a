"""Keys that every query sees, wherever it stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.tiles import Spans, kinds
from vllm_teach.attention.shapes import keep_count
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Every query sees those of the first `n` keys that do not lie ahead of it.

    So it never shows the future, and `GlobalTokens(4) | LocalWindow(511)` is causal as it stands: attention sinks
    (StreamingLLM, arXiv 2309.17453, section 3.2), four tokens beside a window of 512. That paper also counts positions
    within its cache; a mask leaves them as they are.

    `symmetric` is for encoders, which look both ways: every query sees the first `n` keys, ahead of it or not, and the
    queries at the positions 0 … n - 1 see every key (Longformer's global attention, arXiv 2004.05150, section 3.1).
    """

    n: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        keep_count(self, "n", 0)
        if not isinstance(self.symmetric, bool):
            raise InvalidArgumentError(f"symmetric is {self.symmetric!r}; give True or False.")

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        if self.symmetric:
            return (k_pos < self.n) | ((q_pos >= 0) & (q_pos < self.n))
        return (k_pos < self.n) & (k_pos <= q_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Exact: one corner of a tile is seen if any pair is, and the opposite one only if all are."""
        q_first, q_last = queries.first[:, None], queries.last[:, None]
        k_first, k_last = keys.first[None, :], keys.last[None, :]
        if self.symmetric:
            no_global_query = q_first.clamp(min=0) > q_last.clamp(max=self.n - 1)
            only_global_queries = (q_first >= 0) & (q_last < self.n)
            return kinds((k_first >= self.n) & no_global_query, (k_last < self.n) | only_global_queries)
        return kinds((k_first >= self.n) | (k_first > q_last), (k_last < self.n) & (k_last <= q_first))
