"""Eviction policies: which cached content is given up first when a block is needed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_teach.errors import InvalidArgumentError


@dataclass
class Usage:
    """What the policies know of one entry: when it came, when its block was last let go of, how often it was used.

    Times count the events of one queue, so no two are equal. None of the three ever goes down.
    """

    inserted: int
    released: int
    uses: int = 1


# The entry with the lowest rank is given up first.
RANKS: dict[str, Callable[[Usage], tuple[int, ...]]] = {
    # Least recently used: let go of longest ago.
    "lru": lambda usage: (usage.released,),
    # First in, first out, however much it is used.
    "fifo": lambda usage: (usage.inserted,),
    # Least frequently used: by how many sequences; of those, the least recently used.
    "lfu": lambda usage: (usage.uses, usage.released),
}

# "none" keeps nothing once no sequence holds it: only sequences that are alive at the same time share.
EVICTION_POLICIES = (*RANKS, "none")

Entry = TypeVar("Entry")


class EvictionQueue(Generic[Entry]):
    """The entries that may be given up, in the order of the policy; each operation takes O(log n).

    An entry has at most one place in a heap, under the rank it had when it got it. Ranks never go down, so the place
    comes up too early rather than too late; then the entry gets a new one, or leaves if it may not be given up at
    present (somebody uses it again): who makes it evictable again offers it again. That way a use costs nothing here.
    """

    def __init__(self, policy: str) -> None:
        if policy not in EVICTION_POLICIES:
            raise InvalidArgumentError(f"eviction={policy!r} is not known: choose one of {EVICTION_POLICIES}.")
        self.policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Entry, Usage]] = []
        self._queued: set[Entry] = set()
        self._time = 0

    @property
    def keeps_idle(self) -> bool:
        """Whether content stays when no sequence holds it."""
        return self.policy != "none"

    def now(self) -> int:
        """Return the time, later than all times before."""
        self._time += 1
        return self._time

    def offer(self, entry: Entry, usage: Usage) -> None:
        """`entry` may be given up from now on. Changes to `usage` are seen when its turn comes."""
        if entry not in self._queued:
            self._queued.add(entry)
            heapq.heappush(self._heap, (RANKS[self.policy](usage), self.now(), entry, usage))

    def pop(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """Remove the first entry that is `evictable` now and return it, or None; forgets those that are not."""
        while self._heap:
            rank, _, entry, usage = heapq.heappop(self._heap)
            self._queued.remove(entry)
            if not evictable(entry):
                continue
            if rank == RANKS[self.policy](usage):
                return entry
            self.offer(entry, usage)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        self._heap.clear()
        self._queued.clear()
