"""The order in which sequences get their turn."""

from __future__ import annotations

from bisect import bisect_left, insort

from vllm_teach.engine.request import Sequence


class SequenceQueue(list[Sequence]):
    """A list of sequences that `add` keeps in order: the first is served first, the last is preempted first.

    Under "fcfs" the order is that of arrival, under "priority" the lower number goes first, then arrival. A preempted
    sequence is added like any other: since it came before all that still wait, "fcfs" brings it to the front.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._by_priority = policy == "priority"

    def key(self, sequence: Sequence) -> tuple[int, int]:
        """Return what the order is by; no two sequences have the same."""
        return (sequence.priority if self._by_priority else 0), sequence.arrival

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` where it belongs."""
        insort(self, sequence, key=self.key)

    def discard(self, sequence: Sequence) -> bool:
        """Take `sequence` out, in O(log n) comparisons; return whether it was there."""
        place = bisect_left(self, self.key(sequence), key=self.key)
        found = place < len(self) and self[place] is sequence
        if found:
            del self[place]
        return found
