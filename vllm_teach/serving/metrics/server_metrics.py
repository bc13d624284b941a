"""What the server tells Prometheus: `GET /metrics`, in vLLM's names where it has one for the figure.

`describe_metrics` lists them all. Percentiles come from the histograms' buckets, by Prometheus' `histogram_quantile`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from vllm_teach.errors import EngineDeadError, VllmTeachError
from vllm_teach.serving.async_engine.messages import EngineReady, RequestDelta
from vllm_teach.serving.metrics.engine_metrics import EngineMetrics
from vllm_teach.serving.metrics.instruments import Instruments
from vllm_teach.serving.metrics.request_metrics import RequestMetrics
from vllm_teach.serving.metrics.step_report import StepReport

# Up to what a server is well (0.1 s), and beyond.
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# A client may name a method as it likes, and each name would be a series.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class ServerMetrics:
    """All metrics of one server, which runs one engine at a time. Call it in the event loop's thread.

    Each server has a registry of its own, with the process's figures (`process_…`), unless `registry` is given; a
    registry takes one server. The labels `model_name` and `engine` are on every metric but those of the process.
    """

    def __init__(
        self,
        model_name: str,
        *,
        registry: CollectorRegistry | None = None,
        engine: str = "0",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        if registry is None:
            ProcessCollector(registry=self.registry)
        make = Instruments(self.registry, {"model_name": model_name, "engine": engine})
        self._engine = EngineMetrics(make, clock)
        self._requests = RequestMetrics(make)
        self._responses = make.counters("http_requests_total", "HTTP requests answered.", "method", "handler", "status")
        self._lag = make.histogram(
            "vllm_teach:event_loop_lag_seconds", "How late the server's event loop was.", LAG_BOUNDS
        )

    def on_ready(self, ready: EngineReady) -> None:
        """The engine is loaded: call it once for each engine that was started."""
        self._engine.on_ready(ready)

    def on_report(self, report: StepReport) -> None:
        """Take the engine's figures."""
        self._engine.on_report(report)

    def on_finished(self, delta: RequestDelta) -> None:
        """Count a request that ended, however it did: also one aborted, timed out or failed; its error is counted here.

        `delta` is its last one, with `metrics`, `num_prompt_tokens` and `num_generation_tokens`; the reason is that of
        its last completion's `finish_reason` ("abort" where a client went away), or "error".
        """
        self._requests.on_finished(delta)
        self._look_for_death(delta.error)

    def on_error(self, error: VllmTeachError | str) -> None:
        """Count a request that never came to the engine, by its error or by a kind ("unauthorized", say)."""
        self._requests.on_error(error)
        self._look_for_death(error)

    def on_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP answer. `route` is the path's template, or "unknown" where there is none."""
        self._responses(method if method in METHODS else "other", route, str(status)).inc()

    def on_event_loop_lag(self, seconds: float) -> None:
        """Take how late the event loop woke up."""
        self._lag.counts.add(seconds)

    def _look_for_death(self, error: object) -> None:
        if isinstance(error, EngineDeadError):
            self._engine.on_dead()

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of an answer to `GET /metrics`."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class MetricDescription(NamedTuple):
    """A metric as README and lesson list it: its name, its kind (gauge, counter, histogram) and what it says."""

    name: str
    kind: str
    text: str


def describe_metrics() -> list[MetricDescription]:
    """Return every metric of a server but the process's, by name."""
    registry = CollectorRegistry()
    ServerMetrics("", registry=registry)
    families = sorted(registry.collect(), key=lambda family: family.name)
    return [
        MetricDescription(
            family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation
        )
        for family in families
    ]
