"""Where a mask's diagonal starts: patterns are aligned bottom-right, some of xFormers' masks are aligned top-left.

    3 queries, 5 keys     top-left      bottom-right
                          1 . . . .     1 1 1 . .
                          1 1 . . .     1 1 1 1 .
                          1 1 1 . .     1 1 1 1 1

Bottom-right is what decoding needs: the queries are the last tokens of the text. Top-left is the same thing only when
there are as many queries as keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.patterns.base import Pattern, Rule
from vllm_teach.attention.patterns.tiles import Spans


@dataclass(frozen=True)
class Shifted(Pattern):
    """A query sees what `pattern` shows to a query that stands `by` positions later (earlier, if negative)."""

    pattern: Pattern
    by: int

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.pattern.sees(q_pos + self.by, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        seen, by = self.pattern.rule(device), self.by
        return lambda q_pos, k_pos: seen(q_pos + by, k_pos)

    @property
    def by_diagonal(self) -> bool:
        """As the pattern: the diagonals move, and stay diagonals."""
        return self.pattern.by_diagonal

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """As exact as the pattern's own."""
        return self.pattern.classify(Spans(queries.first + self.by, queries.last + self.by), keys)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.pattern.check_lengths(q_len, kv_len)


def top_left(pattern: Pattern, q_len: int, kv_len: int) -> Pattern:
    """Return `pattern` so moved that query i stands at key i, not at key i + kv_len - q_len."""
    return pattern if q_len == kv_len else Shifted(pattern, q_len - kv_len)
