"""Sequences whose keys lie behind one another, like their queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from vllm_teach.attention.attn_bias.alignment import top_left
from vllm_teach.attention.attn_bias.seqlens import SeqLenInfo
from vllm_teach.attention.attn_bias.sequences import SequenceBias
from vllm_teach.attention.attn_bias.triangular import causal_window
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import Causal
from vllm_teach.attention.shapes import check_count, check_tensor
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class BlockDiagonalMask(SequenceBias):
    """The queries of sequence i see all keys of sequence i.

    `_batch_sizes`, where given, says how many sequences one tensor of `from_tensor_list` held: `split` stacks them
    again.
    """

    _batch_sizes: list[int] | None = None

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make the bias of sequences of these lengths; `kv_seqlen` is `q_seqlen` for None. A length may be 0.

        Raises InvalidArgumentError when the two lists are not equally long, or hold anything but whole numbers from 0.
        """
        q_seqinfo = SeqLenInfo.from_seqlens(q_seqlen, device=device, name="q_seqlen")
        if kv_seqlen is None:
            return cls(q_seqinfo, q_seqinfo)
        return cls(q_seqinfo, SeqLenInfo.from_seqlens(kv_seqlen, device=device, name="kv_seqlen"))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """Lay tensors `[batch_i, length_i, …]` behind one another; return the bias and `[1, all tokens, …]`."""
        bias, joined, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return bias, joined

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Self, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Lay queries, keys and values behind one another; return the bias and `[1, all tokens, …]` of each.

        Raises InvalidArgumentError when the lists do not hold the same sequences, or none.
        """
        _check_tensors("tensors_q", tensors_q, tensors_q)
        _check_tensors("tensors_k", tensors_k, tensors_q)
        if tensors_v is not None:
            _check_tensors("tensors_v", tensors_v, tensors_q)
        for i, (q, k) in enumerate(zip(tensors_q, tensors_k, strict=True)):
            if k.shape[0] != q.shape[0] or q.shape[0] == 0:
                raise InvalidArgumentError(
                    f"tensors_k[{i}] has shape {list(k.shape)} and tensors_q[{i}] {list(q.shape)}; their batch sizes "
                    "must be equal and not 0."
                )
            if tensors_v is not None and tensors_v[i].shape[:2] != k.shape[:2]:
                raise InvalidArgumentError(
                    f"tensors_v[{i}] has shape {list(tensors_v[i].shape)} and tensors_k[{i}] {list(k.shape)}; their "
                    "first two sizes must be equal."
                )
        q_seqlen = [q.shape[1] for q in tensors_q for _ in range(q.shape[0])]
        kv_seqlen = [k.shape[1] for k in tensors_k for _ in range(k.shape[0])]
        bias = cls.from_seqlens(q_seqlen, kv_seqlen)
        bias = replace(bias, _batch_sizes=[q.shape[0] for q in tensors_q])
        return bias, _join(tensors_q), _join(tensors_k), None if tensors_v is None else _join(tensors_v)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Undo `from_tensor_list`: cut `[1, all tokens, …]` into the tensors it was made from, as views.

        Raises InvalidArgumentError when queries and keys differ in length; use `split_queries` or `split_kv` then.
        """
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise InvalidArgumentError(
                "The sequences' queries and keys differ in length; use split_queries or split_kv."
            )
        return self.split_queries(tensor)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cut what lies like the queries, `[1, all queries, …]`, into one tensor for each sequence, or as it came."""
        return _split(tensor, self.q_seqinfo, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cut what lies like the keys, `[1, all keys, …]`, into one tensor for each sequence, or as it came."""
        return _split(tensor, self.k_seqinfo, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Return the same sequences, causal in each, aligned top-left."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Return the same sequences, causal in each, aligned bottom-right."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Return the same sequences, causal and local in each, aligned top-left."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Return the same sequences, causal and local in each, aligned bottom-right."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal within each sequence, aligned top-left: its query i sees its keys 0 to i."""

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return top_left(Causal(), q_len, kv_len)


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal within each sequence, aligned bottom-right: its last query sees its last key.

    Like xFormers it refuses a sequence with more queries than keys, some of which would see no key.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, (q_len, kv_len) in enumerate(_lengths(self)):
            if kv_len < q_len:
                raise InvalidArgumentError(
                    f"Sequence {i} has {q_len} queries and {kv_len} keys; give it at least as many keys as queries."
                )

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return Causal()


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Causal and local within each sequence, aligned top-left: query i sees `_window_size` keys, key i the last.

    Like xFormers it refuses a sequence in which a query's window ends before it reaches a key.
    """

    _window_size: int = 0  # a default, as the field before it has one; 0 is refused

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_window_size", check_count("window_size", self._window_size, 1))
        for i, (q_len, kv_len) in enumerate(_lengths(self)):
            if q_len - self._window_size >= kv_len:
                raise InvalidArgumentError(
                    f"Sequence {i} has {q_len} queries and {kv_len} keys; with a window of {self._window_size} its "
                    "last query sees no key: give it more keys or a larger window."
                )

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return top_left(causal_window(self._window_size), q_len, kv_len)


@dataclass(frozen=True, eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Causal and local within each sequence, aligned bottom-right: a query sees `_window_size` keys up to its own."""

    _window_size: int = 0  # a default, as the field before it has one; 0 is refused

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_window_size", check_count("window_size", self._window_size, 1))

    def block_pattern(self, q_len: int, kv_len: int) -> Pattern | None:
        """See `SequenceBias.block_pattern`."""
        return causal_window(self._window_size)


def _lengths(bias: SequenceBias) -> list[tuple[int, int]]:
    """Return (q_len, kv_len) of each sequence."""
    both = zip(bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals(), strict=True)
    return [(q_end - q_start, k_end - k_start) for (q_start, q_end), (k_start, k_end) in both]


def _check_tensors(name: str, tensors: Sequence[torch.Tensor], queries: Sequence[torch.Tensor]) -> None:
    """Raise InvalidArgumentError unless `tensors`, the argument `name`, are as many as `queries` and can be joined."""
    if not isinstance(tensors, list | tuple):
        raise InvalidArgumentError(f"{name} is of type {type(tensors).__name__}; give a list of tensors.")
    if len(tensors) != len(queries) or not tensors:
        raise InvalidArgumentError(
            f"{name} holds {len(tensors)} tensors and tensors_q {len(queries)}; give equally many, and one."
        )
    for i, tensor in enumerate(tensors):
        check_tensor(f"{name}[{i}]", tensor, " [batch, length, ...]")
        first = tensors[0]
        alike = tensor.shape[2:] == first.shape[2:] and (tensor.dtype, tensor.device) == (first.dtype, first.device)
        if tensor.dim() < 2 or not alike:
            raise InvalidArgumentError(
                f"{name}[{i}] has dtype {tensor.dtype} and shape {list(tensor.shape)} on {tensor.device} and {name}[0] "
                f"{first.dtype} and {list(first.shape)} on {first.device}; all but batch and length must be equal."
            )


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten(0, 1)[None] for x in tensors], dim=1)  # each [1, batch * length, …]


def _split(tensor: torch.Tensor, seqinfo: SeqLenInfo, batch_sizes: list[int] | None) -> list[torch.Tensor]:
    check_tensor("tensor", tensor)
    if tensor.dim() < 2 or tensor.shape[0] != 1 or tensor.shape[1] != seqinfo.total:
        raise InvalidArgumentError(
            f"tensor has shape {list(tensor.shape)}; this bias divides [1, {seqinfo.total}, ...] among its sequences."
        )
    pieces = seqinfo.pieces(tensor)
    if batch_sizes is None:
        return pieces
    starts = seqinfo.seqstart_py
    stacked, first = [], 0
    for batch in batch_sizes:
        rows = tensor[:, starts[first] : starts[first + batch]]  # [1, batch * length, …]
        length = starts[first + 1] - starts[first]
        stacked.append(rows.reshape(batch, length, *tensor.shape[2:]))
        first += batch
    return stacked
