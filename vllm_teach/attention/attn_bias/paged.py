"""Sequences whose keys lie in the pages of a cache, where a block table says which.

A page is what this project calls a block: `page_size` tokens. Keys and values are `[1, num_pages * page_size, heads,
head_dim]`, the pages behind one another. Page p of sequence i (its keys p * page_size and on) is the physical page
block_tables[i, p]. Entries behind a sequence's last page, and slots behind its last key, may hold anything: they are
not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from vllm_teach.attention.attn_bias.seqlens import PaddedSeqLenInfo, SeqLenInfo
from vllm_teach.attention.attn_bias.sequences import SequenceBias
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import Causal
from vllm_teach.attention.shapes import check_count, check_real_device, check_tensor
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class PagedBlockDiagonalPaddedKeysMask(SequenceBias):
    """The queries of sequence i see all keys in use in its pages.

    `block_tables` is int32 or int64 `[sequences, most pages of one]`. `materialize` takes the shape over all slots of
    the cache, `[…, q_tokens, num_pages * page_size]`; xFormers takes one over as many slots as the table has, and
    returns one up to the last page in the table.
    """

    k_seqinfo: PaddedSeqLenInfo
    block_tables: torch.Tensor
    page_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pages(self.block_tables, self.page_size)
        if len(self.block_tables) != len(self.k_seqinfo):
            raise InvalidArgumentError(
                f"block_tables has shape {list(self.block_tables.shape)}; its first size must be "
                f"{len(self.k_seqinfo)}, the number of sequences."
            )

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make the bias of sequences of these lengths, with their keys in the pages of `block_tables`.

        Raises InvalidArgumentError when the lengths do not fit each other or the table.
        """
        _check_pages(block_tables, page_size)
        q_seqinfo = SeqLenInfo.from_seqlens(q_seqlen, device=device, name="q_seqlen")
        room = block_tables.shape[1] * page_size
        k_seqinfo = PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, room, device=device, name="kv_seqlen")
        return cls(q_seqinfo, k_seqinfo, block_tables, page_size)

    def check_keys(self, name: str, tokens: int) -> None:
        """Raise InvalidArgumentError unless `tokens` are whole pages, and every page in use is among them."""
        check_real_device("block_tables", self.block_tables)
        pages, rest = divmod(tokens, self.page_size)
        if rest:
            raise InvalidArgumentError(f"{name} has {tokens} tokens; give whole pages of {self.page_size}.")
        for table, kv_len in zip(self.block_tables.tolist(), self.k_seqinfo.seqlen_py, strict=True):
            for page in table[: -(-kv_len // self.page_size)]:
                if not 0 <= page < pages:
                    raise InvalidArgumentError(f"block_tables holds {page}; {name} has the pages 0 to {pages - 1}.")

    def key_rows(self, device: torch.device | str) -> list[torch.Tensor]:
        """See `SequenceBias.key_rows`; each is int64 `[kv_len]`."""
        rows = []
        for table, kv_len in zip(self.block_tables.to(device).long(), self.k_seqinfo.seqlen_py, strict=True):
            position = torch.arange(kv_len, device=device)
            rows.append(table[position // self.page_size] * self.page_size + position % self.page_size)
        return rows

    def keys_of_each(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gather each sequence's keys from its pages, one sequence at a time; this copies them."""
        for rows in self.key_rows(x.device):
            yield x[:, rows]


@dataclass(frozen=True, eq=False)
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Causal within each sequence, aligned bottom-right: its last query sees its last key in use."""

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return Causal()


def _check_pages(tables: torch.Tensor, page_size: int) -> None:
    check_count("page_size", page_size, 1)
    check_tensor("block_tables", tables, " of int32")
    if tables.dtype not in (torch.int32, torch.int64) or tables.dim() != 2:
        raise InvalidArgumentError(
            f"block_tables has dtype {tables.dtype} and shape {list(tables.shape)}; give int32 or int64 of shape "
            "[sequences, most pages of one]."
        )
