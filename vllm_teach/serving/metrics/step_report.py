"""The engine's figures after a step, as the server's metrics read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_teach.engine.bucket_counts import BucketCounts, Buckets
from vllm_teach.engine.step_totals import SECOND_BOUNDS, TOKEN_BOUNDS
from vllm_teach.kvcache.usage import CacheUsage
from vllm_teach.serving.metrics.token_latencies import FIRST_TOKEN_BOUNDS, TOKEN_TIME_BOUNDS


@dataclass(frozen=True, slots=True)
class StepReport:
    """`seconds`, and the tokens by kind, are of this step; queues are of this moment; all others since the start.

    `engine_id` says whose start that is. The queues count sequences, of which a request has `n`; those that will branch
    off a prompt when it is computed wait. In `usage` the tokens stored and the fragmentation may be some seconds old,
    as they take a look at every block. `preemptions` are by mode.

    `prompt_tokens` are those of prompts that are done, cached ones included; `computed_prompt_tokens` were computed, of
    prompts and of what a preemption made compute anew; `generation_tokens` were drawn. `step_tokens` and
    `step_seconds` are distributions over the steps, by the bounds of `engine.step_totals`; so many steps were
    `out_of_memory`. `first_token_seconds` and `inter_token_seconds` are over the tokens of requests that were served.

    `attention_seconds` is the part of all `forward_seconds` that was spent in attention; `attention_calls` counts calls
    by backend. `memory_bytes` is what this engine's processes hold on the host; `device_memory` (used, all) in bytes,
    None without a device.
    """

    step: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    swapped: int
    usage: CacheUsage
    preemptions: dict[str, int] = field(default_factory=dict)
    out_of_memory: int = 0
    forward_seconds: float = 0.0
    attention_seconds: float = 0.0
    attention_calls: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    device_memory: tuple[int, int] | None = None
    engine_id: str = ""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_prompt_tokens: int = 0
    step_tokens: Buckets = field(default_factory=BucketCounts(TOKEN_BOUNDS).read)
    step_seconds: Buckets = field(default_factory=BucketCounts(SECOND_BOUNDS).read)
    first_token_seconds: Buckets = field(default_factory=BucketCounts(FIRST_TOKEN_BOUNDS).read)
    inter_token_seconds: Buckets = field(default_factory=BucketCounts(TOKEN_TIME_BOUNDS).read)
