"""What is read of an engine's report for Prometheus, one entry a metric.

Names with `vllm:` are vLLM's; `vllm_teach:` marks what it does not have. Where those speak of requests, sequences are
counted, of which a request has `n`: vLLM, which makes `n` requests of it, counts the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_teach.engine.step_totals import SECOND_BOUNDS, TOKEN_BOUNDS
from vllm_teach.serving.metrics.step_report import StepReport
from vllm_teach.serving.metrics.token_latencies import FIRST_TOKEN_BOUNDS, TOKEN_TIME_BOUNDS


@dataclass(frozen=True)
class Figure:
    """A metric `name`, with its one line of help, whose value `read` takes from a report.

    A "gauge" goes up and down, a "counter" only grows; both are numbers, or with `label` a dict of them by that label's
    value, of which `values` are there from the start. A "histogram" is `Buckets` by `bounds`, which only grow.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    read: Callable[[StepReport], Any]
    label: str | None = None
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


QUEUES = (
    Figure("gauge", "vllm:num_requests_running", "Sequences in the batch.", lambda report: report.running),
    Figure(
        "gauge",
        "vllm:num_requests_waiting",
        "Sequences that wait for a place in the batch.",
        lambda report: report.waiting,
    ),
    Figure(
        "gauge",
        "vllm:num_requests_swapped",
        "Sequences whose KV blocks are on the host.",
        lambda report: report.swapped,
    ),
    Figure(
        "counter",
        "vllm:num_preemptions_total",
        "Sequences that lost their KV blocks to others.",
        lambda report: sum(report.preemptions.values()),
    ),
    Figure(
        "counter",
        "vllm_teach:preemptions_total",
        "The same by mode: computed again (recompute), or copied to the host and back (swap).",
        lambda report: report.preemptions,
        label="mode",
        values=("recompute", "swap"),
    ),
)

WORK = (
    Figure(
        "counter",
        "vllm:prompt_tokens_total",
        "Tokens of prompts that were read to their end, cached ones included.",
        lambda report: report.prompt_tokens,
    ),
    Figure("counter", "vllm:generation_tokens_total", "Tokens generated.", lambda report: report.generation_tokens),
    Figure(
        "counter",
        "vllm_teach:computed_prompt_tokens_total",
        "Tokens computed in prefill: not the cached ones, but those computed again after a preemption.",
        lambda report: report.computed_prompt_tokens,
    ),
    Figure(
        "histogram",
        "vllm:iteration_tokens_total",
        "Tokens computed in a step, prefill and decode together.",
        lambda report: report.step_tokens,
        bounds=TOKEN_BOUNDS,
    ),
    Figure(
        "histogram",
        "vllm_teach:step_seconds",
        "Seconds that a step took.",
        lambda report: report.step_seconds,
        bounds=SECOND_BOUNDS,
    ),
    Figure(
        "counter",
        "vllm_teach:out_of_memory_total",
        "Steps that failed for want of memory.",
        lambda report: report.out_of_memory,
    ),
)

LATENCY = (
    Figure(
        "histogram",
        "vllm:time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        lambda report: report.first_token_seconds,
        bounds=FIRST_TOKEN_BOUNDS,
    ),
    Figure(
        "histogram",
        "vllm:inter_token_latency_seconds",
        "Seconds from one token of a request to the next.",
        lambda report: report.inter_token_seconds,
        bounds=TOKEN_TIME_BOUNDS,
    ),
)

CACHE = (
    Figure(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that sequences hold, 0 to 1.",
        lambda report: report.usage.held_share,
    ),
    Figure(
        "gauge",
        "vllm:cpu_cache_usage_perc",
        "Share of the host's KV blocks, for swapping, in use, 0 to 1.",
        lambda report: report.usage.host_blocks_used / max(1, report.usage.num_host_blocks),
    ),
    Figure(
        "counter",
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda report: report.usage.hit_queries,
    ),
    Figure(
        "counter",
        "vllm:prefix_cache_hits_total",
        "Prompt tokens found there, which are not computed.",
        lambda report: report.usage.hit_tokens,
    ),
    Figure(
        "gauge",
        "vllm_teach:kv_cache_blocks",
        "KV blocks by state: held by sequences, idle (kept for prefix hits only) or free.",
        lambda report: {
            "held": report.usage.held_blocks,
            "idle": report.usage.idle_blocks,
            "free": report.usage.free_blocks,
        },
        label="state",
    ),
    Figure(
        "gauge",
        "vllm_teach:kv_cache_fragmentation_ratio",
        "Held slots without a token (internal), free blocks outside the longest free run (external), 0 to 1.",
        lambda report: {
            "internal": report.usage.internal_fragmentation,
            "external": report.usage.external_fragmentation,
        },
        label="kind",
    ),
    Figure(
        "counter",
        "vllm_teach:kv_cache_block_operations_total",
        "KV blocks by what was done to them: swapped out or in, copied on write, moved, evicted.",
        lambda report: {
            "swap_out": report.usage.swapped_out,
            "swap_in": report.usage.swapped_in,
            "copy": report.usage.copies,
            "move": report.usage.moves,
            "evict": report.usage.evictions,
        },
        label="operation",
    ),
)

ATTENTION = (
    Figure(
        "counter",
        "vllm_teach:forward_seconds_total",
        "Seconds in the model's layers, of the passes that were timed: all, or on a GPU one of eight.",
        lambda report: report.forward_seconds,
    ),
    Figure(
        "counter",
        "vllm_teach:attention_seconds_total",
        "The part of vllm_teach:forward_seconds_total in which layers stored K and V and attended.",
        lambda report: report.attention_seconds,
    ),
    Figure(
        "counter",
        "vllm_teach:attention_calls_total",
        "Attention calls, one a layer and step, by the backend that computed them.",
        lambda report: report.attention_calls,
        label="backend",
    ),
)

ENGINE_FIGURES = (*QUEUES, *WORK, *LATENCY, *CACHE, *ATTENTION)
