"""Biases that divide a batch of 1 into sequences: a query sees keys of its own sequence alone.

Such a bias makes a batch of sequences of different lengths without padding: all tokens lie behind one another in one
long row. Written out, the mask would be as large as the square of all tokens; here the sequences are computed one by
one, and no key is touched that belongs to another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from vllm_teach.attention.attn_bias.base import AttentionBias, additive, lengths_of
from vllm_teach.attention.attn_bias.seqlens import SeqLenInfo
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class SequenceBias(AttentionBias):
    """`q_seqinfo` divides the queries, `k_seqinfo` the keys, among equally many sequences."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def __post_init__(self) -> None:
        for name in ("q_seqinfo", "k_seqinfo"):
            if not isinstance(info := getattr(self, name), SeqLenInfo):
                raise InvalidArgumentError(
                    f"{name} is of type {type(info).__name__}; make the bias with {type(self).__name__}.from_seqlens."
                )
        if len(self.q_seqinfo) != len(self.k_seqinfo):
            raise InvalidArgumentError(
                f"The queries are divided among {len(self.q_seqinfo)} sequences and the keys among "
                f"{len(self.k_seqinfo)}; make them equal."
            )

    @abstractmethod
    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """Return which keys a query sees within a sequence of these lengths; None: all."""

    def key_rows(self, device: torch.device | str) -> Iterable[slice | torch.Tensor]:
        """Return, for each sequence, which rows of k and v are its keys, in their order; tensors are on `device`."""
        return [slice(*interval) for interval in self.k_seqinfo.intervals()]

    def keys_of_each(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each sequence's rows of k or v `[1, slots, …]`, as `[1, kv_len, …]`."""
        yield from self.k_seqinfo.pieces(x)

    def check_queries(self, name: str, tokens: int) -> None:
        """Raise InvalidArgumentError unless so many queries, in the argument `name`, are what is divided."""
        self._check(name, tokens, self.q_seqinfo.total)

    def check_keys(self, name: str, tokens: int) -> None:
        """Raise InvalidArgumentError unless so many keys, in the argument `name`, are what is divided."""
        self._check(name, tokens, self.k_seqinfo.total)

    def _check(self, name: str, tokens: int, wanted: int) -> None:
        if tokens != wanted:
            raise InvalidArgumentError(
                f"{name} has {tokens} tokens and attn_bias, a {type(self).__name__}, divides {wanted} among its "
                "sequences; make the two equal."
            )

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """See `AttentionBias.materialize`; the lengths in `shape` are those of all tokens together."""
        q_total, kv_total = lengths_of(shape)
        self.check_queries(f"shape[-2] of {list(shape)}", q_total)
        self.check_keys(f"shape[-1] of {list(shape)}", kv_total)
        visible = torch.zeros(q_total, kv_total, dtype=torch.bool, device=device)
        rows_of_keys = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), self.key_rows(device), strict=True)
        for (q_start, q_end), (k_start, k_end), key_rows in rows_of_keys:
            q_len, kv_len = q_end - q_start, k_end - k_start
            pattern = self.block_pattern(q_len, kv_len)
            visible[q_start:q_end, key_rows] = True if pattern is None else pattern.mask(q_len, kv_len, device)
        return additive(visible, dtype).expand(*shape)

    def to(self, device: torch.device | str) -> Self:
        """Return the same bias with its tensors on `device`."""
        moved = {f.name: x.to(device) for f in fields(self) if hasattr(x := getattr(self, f.name), "to")}
        return replace(self, **moved)
