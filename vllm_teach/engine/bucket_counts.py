"""How many values lie between which bounds: what a Prometheus histogram is made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_teach.errors import InvalidArgumentError


class Buckets(NamedTuple):
    """`counts[i]` values are at most bound i and above the one before; the last has those above all bounds."""

    counts: tuple[int, ...]
    total: float


class BucketCounts:
    """Counts values by `bounds`, which ascend, and adds them up. Memory stays the same however many there are."""

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise InvalidArgumentError(f"bounds={tuple(bounds)} is not valid: give at least one, in ascending order.")
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def add_all(self, values: Iterable[float]) -> None:
        """Count each of `values`."""
        for value in values:
            self.add(value)

    def add_difference(self, now: Buckets, before: Buckets | None = None) -> None:
        """Count what came to `now` since `before`, both of the same bounds; None is before the first value."""
        earlier = before or Buckets((0,) * len(now.counts), 0.0)
        self._counts = [own + new - old for own, new, old in zip(self._counts, now.counts, earlier.counts, strict=True)]
        self._total += now.total - earlier.total

    def read(self) -> Buckets:
        """Return the counts of this moment."""
        return Buckets(tuple(self._counts), self._total)
