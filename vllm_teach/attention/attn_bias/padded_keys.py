"""Sequences whose keys lie in rooms of equal size, as in a cache that reserves the longest length for each.

Of each room the first `kv_seqlen` keys are in use; what follows may hold anything, NaN too, and is not read. The
queries lie behind one another without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from vllm_teach.attention.attn_bias.seqlens import PaddedSeqLenInfo, SeqLenInfo
from vllm_teach.attention.attn_bias.sequences import SequenceBias
from vllm_teach.attention.attn_bias.triangular import causal_window
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import Causal, LocalWindow
from vllm_teach.attention.shapes import check_count, keep_count
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from vllm_teach.attention.attn_bias.paged import PagedBlockDiagonalPaddedKeysMask

PagedType = TypeVar("PagedType", bound="PagedBlockDiagonalPaddedKeysMask")


@dataclass(frozen=True, eq=False)
class BlockDiagonalPaddedKeysMask(SequenceBias):
    """The queries of sequence i see all keys in use in room i."""

    k_seqinfo: PaddedSeqLenInfo

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: object = None,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make the bias of sequences of these lengths, the keys in rooms of `kv_padding`.

        `causal_diagonal` is not used; xFormers takes it for old callers' sake. Raises InvalidArgumentError when the
        lists are not equally long, or hold anything but whole numbers from 0, to kv_padding for the keys.
        """
        return cls(*_divide(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: torch.Tensor, page_size: int, paged_type: type[PagedType]) -> PagedType:
        """Return the bias of the same sequences whose keys lie in the pages of a cache; see `paged`.

        `paged_type` is the paged class to make. Raises InvalidArgumentError for another, or a table that does not fit.
        """
        from vllm_teach.attention.attn_bias.paged import PagedBlockDiagonalPaddedKeysMask

        if not (isinstance(paged_type, type) and issubclass(paged_type, PagedBlockDiagonalPaddedKeysMask)):
            raise InvalidArgumentError(
                f"paged_type is {paged_type!r}; give the class PagedBlockDiagonalPaddedKeysMask or one below it."
            )
        return paged_type.from_seqlens(
            [end - start for start, end in self.q_seqinfo.intervals()],
            self.k_seqinfo.seqlen_py,
            block_tables,
            page_size,
            device=self.q_seqinfo.seqstart.device,
        )

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """Return the same sequences, local in each."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal within each sequence, aligned bottom-right: its last query sees its last key in use.

    This is decoding with a cache: the queries are the last tokens of the text. `causal_diagonal` is not used.
    """

    causal_diagonal: object = None

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return Causal()


@dataclass(frozen=True, eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Local within each sequence, aligned bottom-right; counted as in `LocalAttentionFromBottomRightMask`."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_count(self, "window_left", 0)
        keep_count(self, "window_right", 0)

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return LocalWindow(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Self:
        """Make the bias of such sequences; see `BlockDiagonalPaddedKeysMask.from_seqlens`."""
        return cls(*_divide(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal and local within each sequence, aligned bottom-right: a query sees `_window_size` keys up to its own."""

    _window_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_window_size", check_count("window_size", self._window_size, 1))

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return causal_window(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        """Make the bias of such sequences; see `BlockDiagonalPaddedKeysMask.from_seqlens`."""
        return cls(*_divide(q_seqlen, kv_padding, kv_seqlen, None), window_size)


def _divide(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: torch.device | str | None
) -> tuple[SeqLenInfo, PaddedSeqLenInfo]:
    kv_padding = check_count("kv_padding", kv_padding, 0)
    q_seqinfo = SeqLenInfo.from_seqlens(q_seqlen, device=device, name="q_seqlen")
    return q_seqinfo, PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device, name="kv_seqlen")
