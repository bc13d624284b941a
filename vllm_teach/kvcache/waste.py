"""Work and memory spent on nothing: the padding of static batches, beside the last blocks of paged sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError

# (prompt length, output length) of each request, in the order of arrival.
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Waste:
    """`total` positions were computed or held, of which `useful` serve a request."""

    useful: int
    total: int

    @property
    def share(self) -> float:
        """The wasted share of the total, 0 to 1."""
        return 1 - self.useful / self.total


def padding_waste(lengths: Lengths, batch_size: int) -> Waste:
    """Return what padded static batches of `batch_size` requests compute for nothing, in token positions.

    Prompts are padded to the longest of their batch, and the batch goes on, all rows of it, until its longest output
    ends: (longest prompt + longest output) · rows positions. A batch of flattened tokens computes no padding.
    """
    _check("batch_size", batch_size)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    total = sum(len(batch) * (max(p for p, _ in batch) + max(o for _, o in batch)) for batch in batches)
    return Waste(_tokens(lengths), total)


def last_block_waste(lengths: Lengths, block_size: int) -> Waste:
    """Return what paging holds for nothing when each sequence is at its end, in slots: the rest of its last block.

    At most block_size - 1 slots a sequence, whatever its length (Kwon et al. 2023, section 4.1).
    """
    _check("block_size", block_size)
    total = sum(-(-(prompt + output) // block_size) * block_size for prompt, output in lengths)
    return Waste(_tokens(lengths), total)


def _tokens(lengths: Lengths) -> int:
    if not lengths:
        raise InvalidArgumentError("lengths is empty: give at least one (prompt length, output length).")
    return sum(prompt + output for prompt, output in lengths)


def _check(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgumentError(f"{name}={value} is not valid: give at least 1.")
