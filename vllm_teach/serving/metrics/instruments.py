"""Makes Prometheus metrics that carry the same labels throughout, and a histogram that takes many values at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_teach.engine.bucket_counts import BucketCounts


class Instruments:
    """Makes metrics in `registry`, all with `labels`. A name may be made once; ValueError otherwise."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.registry = registry
        self._names, self._values = tuple(labels), tuple(labels.values())
        # The time at which each series began doubles their number, and Prometheus makes nothing of it by default.
        disable_created_metrics()

    def gauge(self, name: str, text: str) -> Gauge:
        """Return a gauge, at 0."""
        return Gauge(name, text, self._names, registry=self.registry).labels(*self._values)

    def gauges(self, name: str, text: str, *labels: str) -> Callable[..., Gauge]:
        """Return a function from the values of further `labels` to a gauge, which is made when first asked for."""
        family = Gauge(name, text, (*self._names, *labels), registry=self.registry)
        return lambda *values: family.labels(*self._values, *values)

    def counter(self, name: str, text: str) -> Counter:
        """Return a counter, at 0. Its name ends in `_total`."""
        return Counter(name, text, self._names, registry=self.registry).labels(*self._values)

    def counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Return a function from the values of further `labels` to a counter, which is made when first asked for."""
        family = Counter(name, text, (*self._names, *labels), registry=self.registry)
        return lambda *values: family.labels(*self._values, *values)

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """Return an empty histogram with these upper bounds, to which +Inf is added."""
        return Histogram(name, text, dict(zip(self._names, self._values, strict=True)), bounds, self.registry)


class Histogram(Collector):
    """A Prometheus histogram that takes many values at once: prometheus_client's takes a lock for each."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts = BucketCounts(bounds)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return the family without values: the registry sees by it whether the name is free."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Return the family: Prometheus' buckets are cumulative."""
        family = self._family()
        counts, total = self.counts.read()
        bounds = (*map(floatToGoString, self.counts.bounds), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets=buckets, sum_value=total)
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
