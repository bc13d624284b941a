"""How one dimension is divided among sequences: behind one another, or each in a room of equal size.

The attributes have xFormers' names (there `_SeqLenInfo` and `_PaddedSeqLenInfo`). What ends in `_py` are Python
numbers; the tensor beside it holds the same, for those who hand it to a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import torch

from vllm_teach.attention.shapes import check_count, check_real_device, check_tensor
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class SeqLenInfo:
    """Sequences behind one another without gaps. Lengths 2, 3 and 2 give `seqstart_py` [0, 2, 5, 7].

    `seqstart` is int32 `[sequences + 1]`; `max_seqlen` and `min_seqlen` are the longest and shortest length, 0 where
    there is no sequence.
    """

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @staticmethod
    def from_seqlens(
        seqlens: Sequence[int] | torch.Tensor, *, device: torch.device | str | None = None, name: str = "seqlens"
    ) -> SeqLenInfo:
        """Divide the dimension among sequences of these lengths, given as the argument `name`.

        Raises InvalidArgumentError when one is not a whole number from 0.
        """
        lengths = check_lengths(name, seqlens)
        starts = list(accumulate(lengths, initial=0))
        _check_total(name, starts[-1])
        return SeqLenInfo(_int32(starts, device), max(lengths, default=0), min(lengths, default=0), starts)

    def __len__(self) -> int:
        return len(self.seqstart_py) - 1

    @property
    def total(self) -> int:
        """The size of the dimension."""
        return self.seqstart_py[-1]

    def intervals(self) -> list[tuple[int, int]]:
        """Return the first index of each sequence, and the one behind its last."""
        return list(pairwise(self.seqstart_py))

    def pieces(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Cut `x` `[1, total, …]` into one view `[1, length, …]` for each sequence."""
        rooms = [end - start for start, end in pairwise(self.seqstart_py)]
        # One split of the whole rather than a slice for each: a slice's gradient is as large as what it was cut from.
        cut = x.split(rooms, dim=1) if rooms else ()
        return [piece[:, : end - start] for piece, (start, end) in zip(cut, self.intervals(), strict=True)]

    def to(self, device: torch.device | str) -> Self:
        """Return the same division with its tensors on `device`."""
        return replace(self, seqstart=self.seqstart.to(device))


@dataclass(frozen=True, eq=False)
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences in rooms of `padding` each, filled from the front. Lengths 2, 3 and 2 in rooms of 4:

        0: x x . .    4: x x x .    8: x x . .      seqstart_py [0, 4, 8, 12], seqlen_py [2, 3, 2]

    `seqlen` is int32 `[sequences]`.
    """

    seqlen: torch.Tensor
    seqlen_py: list[int]
    padding: int

    @staticmethod
    def from_seqlens_padded(
        seqlens: Sequence[int] | torch.Tensor,
        padding: int,
        *,
        device: torch.device | str | None = None,
        name: str = "seqlens",
    ) -> PaddedSeqLenInfo:
        """Give each sequence a room of `padding`.

        Raises InvalidArgumentError when a length, given as the argument `name`, is not a whole number from 0 to that.
        """
        lengths = check_lengths(name, seqlens)
        padding = check_count("padding", padding, 0)
        if max(lengths, default=0) > padding:
            raise InvalidArgumentError(f"{name} is {lengths} and padding {padding}; no length may be above it.")
        starts = [i * padding for i in range(len(lengths) + 1)]
        _check_total(f"{name} in rooms of {padding}", starts[-1])
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        return PaddedSeqLenInfo(
            _int32(starts, device), longest, shortest, starts, _int32(lengths, device), lengths, padding
        )

    def intervals(self) -> list[tuple[int, int]]:
        """Return the first index of each sequence, and the one behind its last; what follows in its room is unused."""
        rooms = pairwise(self.seqstart_py)
        return [(start, start + length) for (start, _), length in zip(rooms, self.seqlen_py, strict=True)]

    def to(self, device: torch.device | str) -> Self:
        """Return the same division with its tensors on `device`."""
        return replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))


def check_lengths(name: str, seqlens: Sequence[int] | torch.Tensor) -> list[int]:
    """Return `seqlens`, the argument `name`, as a list; raise InvalidArgumentError unless all are whole and from 0."""
    if isinstance(seqlens, torch.Tensor):
        check_tensor(name, seqlens)
        check_real_device(name, seqlens)
        seqlens = seqlens.tolist()
    if not isinstance(seqlens, list | tuple):
        raise InvalidArgumentError(f"{name} is of type {type(seqlens).__name__}; give a list of lengths.")
    return [check_count(f"{name}[{i}]", length, 0) for i, length in enumerate(seqlens)]


def _check_total(name: str, total: int) -> None:
    if total >= 1 << 31:
        raise InvalidArgumentError(f"{name} takes {total} places; the starts are int32: give fewer than 2**31.")


def _int32(values: list[int], device: torch.device | str | None) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
