"""What each slot of a KV cache is doing: holding a token, waiting for one, or nothing (Kwon et al. 2023, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.occupancy import Memory, Occupancy, simulate_occupancy
from vllm_teach.kvcache.waste import Lengths


@dataclass(frozen=True)
class MemorySplit:
    """Shares of all slots, which add up to 1: the mean over the steps in which a request waited for memory.

    `stored` hold a token; `to_come` are held and will hold one before their sequence ends; `never` are held and will
    not (internal fragmentation); `free` are nobody's, and still no request that waits could have them.
    """

    name: str
    stored: float
    to_come: float
    never: float
    free: float


def split_memory(lengths: Lengths, memory: Memory) -> tuple[Occupancy, MemorySplit]:
    """Run `simulate_occupancy`, and return its result and what the slots did.

    Raises InvalidArgumentError when a request could never fit, or when none ever waited.
    """
    # The last token of a request is sampled and never stored.
    ends = [prompt + output - 1 for prompt, output in lengths]
    sums: list[tuple[int, int, int]] = []

    def observe(running: Sequence[int], tokens: Sequence[int]) -> None:
        stored = to_come = held = 0
        for seq in running:
            slots = sum(length for _, length in memory.runs_of(seq))
            held += slots
            stored += tokens[seq]
            to_come += min(slots, ends[seq]) - tokens[seq]
        sums.append((stored, to_come, held))

    occupancy = simulate_occupancy(lengths, memory, observe)
    chosen = [split for split, waiting in zip(sums, occupancy.waiting, strict=True) if waiting]
    if not chosen:
        raise InvalidArgumentError(
            f"num_slots={memory.num_slots} held all requests at once, so that none waited: "
            "give more requests or less memory."
        )
    slots = memory.num_slots * len(chosen)
    stored, to_come, held = (sum(column) / slots for column in zip(*chosen, strict=True))
    return occupancy, MemorySplit(memory.name, stored, to_come, held - stored - to_come, 1 - held)
