"""The sequences that the cache knows, by number: in the cache or swapped out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import BlockTable


@dataclass(eq=False)
class CachedSequence:
    """The first `num_computed` tokens of `table` are computed; `cursor` is the prefix cache's.

    While it is swapped out its table is empty, and `host_blocks` has, for each logical block, the host's (or NO_BLOCK).
    """

    table: BlockTable
    num_computed: int
    cursor: object
    host_blocks: list[int] | None = None


class CachedSequences:
    """A dictionary of them whose look-ups say what is wrong: each raises InvalidArgumentError."""

    def __init__(self) -> None:
        self._by_id: dict[int, CachedSequence] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __iter__(self) -> Iterator[CachedSequence]:
        return iter(self._by_id.values())

    def check_new(self, seq_id: int) -> None:
        """Raise if `seq_id` is known."""
        if seq_id in self._by_id:
            raise InvalidArgumentError(f"seq_id={seq_id} has blocks in the cache already: free it first.")

    def add(self, seq_id: int, sequence: CachedSequence) -> None:
        """Enter `sequence` under `seq_id`, which is new."""
        self._by_id[seq_id] = sequence

    def remove(self, seq_id: int) -> None:
        """Forget `seq_id`, which is known."""
        del self._by_id[seq_id]

    def find(self, seq_id: int) -> CachedSequence:
        """Return `seq_id`, swapped out or not; raises if it is not known."""
        if seq_id not in self._by_id:
            raise InvalidArgumentError(f"seq_id={seq_id} has no blocks in the cache: begin or fork it first.")
        return self._by_id[seq_id]

    def resident(self, seq_id: int) -> CachedSequence:
        """Return `seq_id`, whose table has its blocks; raises if it is swapped out or not known."""
        sequence = self.find(seq_id)
        if sequence.host_blocks is not None:
            raise InvalidArgumentError(f"seq_id={seq_id} is swapped out: swap it in first.")
        return sequence

    def swapped(self, seq_id: int) -> tuple[CachedSequence, list[int]]:
        """Return `seq_id` and its host blocks; raises if it is not swapped out."""
        sequence = self.find(seq_id)
        if sequence.host_blocks is None:
            raise InvalidArgumentError(f"seq_id={seq_id} is not swapped out: nothing of it is on the host.")
        return sequence, sequence.host_blocks
