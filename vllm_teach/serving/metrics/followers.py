"""Prometheus metrics that follow the figures of an engine, which keeps them itself, in another process.

`follow` takes the figure as it is now. What counts events is followed by what has come since the last time, and `begin`
says where another engine begins: the metric goes on from where it was, so that rates stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from prometheus_client import Counter, Gauge

from vllm_teach.engine.bucket_counts import Buckets
from vllm_teach.serving.metrics.instruments import Histogram

F = TypeVar("F", contravariant=True)


class Follower(Protocol[F]):
    """What each of these can do."""

    def follow(self, figure: F) -> None:
        """Take the figure of this moment."""
        ...

    def begin(self, figure: F) -> None:
        """Another engine tells its figures from now on, and begins at `figure`."""
        ...


class Level:
    """A gauge: follows what goes up and down."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def follow(self, figure: float) -> None:
        """See `Follower`."""
        self._gauge.set(figure)

    def begin(self, figure: float) -> None:
        """See `Follower`."""


class Total:
    """A counter: follows what only grows."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0.0

    def follow(self, figure: float) -> None:
        """See `Follower`."""
        self._counter.inc(figure - self._seen)
        self._seen = figure

    def begin(self, figure: float) -> None:
        """See `Follower`."""
        self._seen = figure


class Distribution:
    """A histogram: follows bucket counts with the same bounds."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._seen: Buckets | None = None

    def follow(self, figure: Buckets) -> None:
        """See `Follower`."""
        self._histogram.counts.add_difference(figure, self._seen)
        self._seen = figure

    def begin(self, figure: Buckets) -> None:
        """See `Follower`."""
        self._seen = figure


class ByLabel:
    """One follower for each value of a label, made by `make` when it is first told; those of `values` at once."""

    def __init__(self, make: Callable[[str], Follower[float]], values: Iterable[str]) -> None:
        self._make = make
        self._followers = {value: make(value) for value in values}

    def follow(self, figure: Mapping[str, float]) -> None:
        """See `Follower`."""
        for value, one in figure.items():
            self._follower(value).follow(one)

    def begin(self, figure: Mapping[str, float]) -> None:
        """See `Follower`. What `figure` does not name begins at 0."""
        for value in {**self._followers, **figure}:
            self._follower(value).begin(figure.get(value, 0.0))

    def _follower(self, value: str) -> Follower[float]:
        if value not in self._followers:
            self._followers[value] = self._make(value)
        return self._followers[value]
