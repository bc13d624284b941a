"""What contiguous runs are worth: keys read as a view instead of gathered, against blocks moved and room reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.kvcache.occupancy import Occupancy, PagedMemory, simulate_occupancy
from vllm_teach.kvcache.waste import Lengths


@dataclass(frozen=True)
class Contiguity:
    """Tokens whose keys and values attention read, over all steps: `viewed` in one run, `gathered` out of scattered
    blocks. `moved` are the slots that compaction copied meanwhile, whole blocks."""

    occupancy: Occupancy
    viewed: int
    gathered: int
    moved: int

    @property
    def viewed_share(self) -> float:
        """The share of the tokens read that was read as a view, 0 to 1."""
        return self.viewed / (self.viewed + self.gathered)


def measure_contiguity(
    lengths: Lengths, num_slots: int, placement: str, block_size: int = 16, *, compact_above: float = 0.5
) -> Contiguity:
    """Run `simulate_occupancy` with that placement and count, in each step, how each sequence's tokens are read.

    `compact_above` is the external fragmentation above which "prefer_contiguous" compacts.
    """
    memory = PagedMemory(num_slots, block_size, placement, compact_above=compact_above)
    read = {True: 0, False: 0}

    def observe(running: Sequence[int], tokens: Sequence[int]) -> None:
        for seq in running:
            read[memory.kv.table(seq).contiguous] += tokens[seq]

    occupancy = simulate_occupancy(lengths, memory, observe)
    return Contiguity(occupancy, read[True], read[False], occupancy.num_moved * block_size)
