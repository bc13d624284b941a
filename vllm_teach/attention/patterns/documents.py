"""Several documents behind one another in one sequence: a query sees only its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import torch

from vllm_teach.attention.patterns.base import Pattern, Rule
from vllm_teach.attention.patterns.tiles import Spans, kinds, remembered
from vllm_teach.attention.shapes import check_real_device, check_tensor
from vllm_teach.errors import InvalidArgumentError

# Each has an entry of 8 bytes in a table, so this is 8 GiB.
_MOST_POSITIONS = 1 << 30


@dataclass(frozen=True, init=False, repr=False)
class Documents(Pattern):
    """A query sees all keys of its own document, before and after it; `Documents(…) & Causal()` only those before.

    Document i has the positions cu_seqlens[i] … cu_seqlens[i + 1] - 1; it may be empty. `cu_seqlens` starts with 0 and
    never falls: a sequence of whole numbers or an integer tensor, kept as a tuple. It must cover all keys, so give
    padding a document of its own. A query before position 0, or behind the last document, sees nothing.

    Queries and keys are cut alike. For sequences of different q_len and kv_len use `attention.layout.Varlen`.
    """

    cu_seqlens: tuple[int, ...]

    def __init__(self, cu_seqlens: Sequence[int] | torch.Tensor) -> None:
        object.__setattr__(self, "cu_seqlens", _starts(cu_seqlens))

    @property
    def total(self) -> int:
        """The positions of all documents together."""
        return self.cu_seqlens[-1]

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.rule(q_pos.device)(q_pos, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        document_of = self._document_of(device)

        def same_document(q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
            query = document_of(q_pos)
            return (query == document_of(k_pos)) & (query >= 0)

        return same_document

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Exact: a span meets every document between its two ends, but for empty ones, which are at no end."""
        document_of = self._document_of(queries.first.device)
        first, last = queries.first[:, None], queries.last[:, None]
        touching, inside = (first < self.total) & (last >= 0), (first >= 0) & (last < self.total)
        q_low, q_high = document_of(first.clamp(min=0)), document_of(last.clamp(max=self.total - 1))
        k_low, k_high = document_of(keys.first)[None, :], document_of(keys.last)[None, :]
        common = touching & (torch.maximum(q_low, k_low) <= torch.minimum(q_high, k_high))
        return kinds(~common, inside & (torch.minimum(q_low, k_low) == torch.maximum(q_high, k_high)))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        if kv_len > self.total:
            raise InvalidArgumentError(
                f"cu_seqlens ends with {self.total} and kv_len is {kv_len}; end it with at least as many, "
                "with a last document for padding."
            )

    def _document_of(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from positions to the documents that they belong to, -1 for none."""
        table, total = _document_table(self.cu_seqlens, device), self.total

        def document_of(position: torch.Tensor) -> torch.Tensor:
            outside = (position < 0) | (position >= total)
            return table[torch.where(outside, total, position)]

        return document_of

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.cu_seqlens))
        if len(self.cu_seqlens) > 8:
            shown = f"{', '.join(map(str, self.cu_seqlens[:4]))}, …, {self.total}"
        return f"Documents([{shown}])"


@remembered(16)
def _document_table(cu_seqlens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The document of each position, int64 `[total + 1]`; the last entry, -1, serves all positions outside."""
    lengths = torch.tensor(cu_seqlens).diff()
    table = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.nn.functional.pad(table, (0, 1), value=-1).to(device)


def _starts(cu_seqlens: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor):
        check_tensor("cu_seqlens", cu_seqlens)
        check_real_device("cu_seqlens", cu_seqlens)
    try:
        values = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
        whole = all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
    except TypeError:
        whole = False
    if not whole:
        raise InvalidArgumentError(
            f"cu_seqlens is of type {type(cu_seqlens).__name__} and no line of whole numbers; give where each document "
            "starts, and last where the last one ends."
        )
    falls = any(end < start for start, end in pairwise(values))
    if not values or values[0] != 0 or falls:
        raise InvalidArgumentError(f"cu_seqlens is {values}; it must start with 0 and never fall.")
    if values[-1] > _MOST_POSITIONS:
        raise InvalidArgumentError(f"cu_seqlens ends with {values[-1]}; it may cover {_MOST_POSITIONS} positions.")
    return tuple(map(int, values))
