"""The metrics of requests: how they ended, how long what took, how long they were, and what went wrong.

A request's figures come when it ends, as in vLLM; only the waits for its tokens do not wait for that, and stand among
the engine's (`token_latencies`). The time in the queue is that of all requests that left it; the others are of those
that ran to their end, since one that was aborted says nothing of how long that takes.
"""

from __future__ import annotations

from vllm_teach.engine.outputs import RequestMetrics as Times
from vllm_teach.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    OutOfMemoryError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    VllmTeachError,
)
from vllm_teach.serving.async_engine.messages import RequestDelta
from vllm_teach.serving.metrics.instruments import Instruments
from vllm_teach.serving.metrics.token_latencies import TOKEN_TIME_BOUNDS

FINISH_REASONS = ("stop", "length", "abort", "error")
# The first class that fits names the kind.
ERROR_KINDS: tuple[tuple[type[VllmTeachError], str], ...] = (
    (OutOfMemoryError, "out_of_memory"),
    (EngineDeadError, "engine_dead"),
    (QueueFullError, "queue_full"),
    (RequestTimeoutError, "timeout"),
    (PromptTooLongError, "prompt_too_long"),
    (InvalidArgumentError, "invalid_request"),
    (EngineError, "request_failed"),
    (VllmTeachError, "other"),
)
# vLLM's bounds, and finer ones below: a small model answers within its first bucket.
LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RequestMetrics:
    """Counts requests as they end."""

    def __init__(self, make: Instruments) -> None:
        self._ended = make.counters(
            "vllm:request_success_total",
            "Requests that ended, by how: stop, length, abort or error.",
            "finished_reason",
        )
        self._errors = make.counters(
            "vllm_teach:request_errors_total", "Requests refused or failed, by kind; out_of_memory apart.", "kind"
        )
        for reason in FINISH_REASONS:
            self._ended(reason)
        for _, kind in ERROR_KINDS:
            self._errors(kind)
        self._add_latencies(make)
        self._prompt = make.histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", LENGTH_BOUNDS)
        self._generation = make.histogram(
            "vllm:request_generation_tokens", "Tokens of all answers to a request.", LENGTH_BOUNDS
        )

    def on_finished(self, delta: RequestDelta) -> None:
        """See `ServerMetrics.on_finished`."""
        reason = finish_reason(delta)
        self._ended(reason).inc()
        if delta.error is not None:
            self.on_error(delta.error)
        if delta.metrics is None:
            return
        if delta.metrics.queue_time is not None:
            self._queue.counts.add(delta.metrics.queue_time)
        if reason in ("stop", "length"):
            self._prompt.counts.add(delta.num_prompt_tokens)
            self._generation.counts.add(delta.num_generation_tokens)
            self._observe_whole(delta.metrics, delta.num_generation_tokens)

    def on_error(self, error: VllmTeachError | str) -> None:
        """See `ServerMetrics.on_error`."""
        kind = (
            error if isinstance(error, str) else next(kind for type_, kind in ERROR_KINDS if isinstance(error, type_))
        )
        self._errors(kind).inc()

    def _add_latencies(self, make: Instruments) -> None:
        self._queue = make.histogram(
            "vllm:request_queue_time_seconds", "Seconds from arrival to the first step.", LATENCY_BOUNDS
        )
        self._per_token = make.histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean seconds between its tokens after the first.",
            TOKEN_TIME_BOUNDS,
        )
        self._whole = make.histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to the end.", LATENCY_BOUNDS
        )
        self._prefill = make.histogram(
            "vllm:request_prefill_time_seconds", "Seconds from the first step to the first token.", LATENCY_BOUNDS
        )
        self._decode = make.histogram(
            "vllm:request_decode_time_seconds", "Seconds from the first token to the last.", LATENCY_BOUNDS
        )
        self._inference = make.histogram(
            "vllm:request_inference_time_seconds", "Seconds from the first step to the last token.", LATENCY_BOUNDS
        )

    def _observe_whole(self, times: Times, num_generation_tokens: int) -> None:
        scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if scheduled is None or first is None or last is None or times.e2e_latency is None:
            return
        self._whole.counts.add(times.e2e_latency)
        self._prefill.counts.add(first - scheduled)
        self._decode.counts.add(last - first)
        self._inference.counts.add(last - scheduled)
        per_token = times.time_per_output_token(num_generation_tokens)
        if per_token is not None:
            self._per_token.counts.add(per_token)


def finish_reason(delta: RequestDelta) -> str:
    """Return how a request ended, by its last delta; of several completions the one that ended last says it."""
    if delta.error is not None:
        return "error"
    reasons = [each.finish_reason for each in delta.completions if each.finish_reason is not None]
    return reasons[-1] if reasons else "abort"
