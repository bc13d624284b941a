"""An engine's limits, and what it tells of a step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_teach.engine.field_checks import (
    check_choice,
    check_flag,
    check_number,
    check_seed,
    check_whole,
    refuse,
    take_plain_numbers,
)
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.scheduler_config import POLICIES, PREEMPTIONS, check_step_limits
from vllm_teach.kvcache.eviction import EVICTION_POLICIES
from vllm_teach.kvcache.placement import PLACEMENTS
from vllm_teach.kvcache.prefix_caches import PREFIX_CACHES

if TYPE_CHECKING:
    from vllm_teach.attention.patterns import Pattern


@dataclass(frozen=True)
class EngineConfig:
    """Limits and policies of an engine, each checked on construction: InvalidArgumentError names the bad one.

    Memory. `kv_cache_memory_bytes` is the budget for K and V over all layers. None means `gpu_memory_utilization` of
    the free memory of a GPU, or a quarter of the available memory of a CPU-only machine, but no more than
    `max_num_seqs` sequences of `max_model_len` tokens need. It is cut into blocks of `block_size` tokens;
    `num_kv_blocks` says how many there are instead. `max_model_len` None means the model's context, or what the cache
    holds if that is less. `swap_space` is host memory for swapped sequences, in GiB; with `swap_file` it lies in a
    file that is mapped into memory, and which no other engine may have meanwhile. `kv_cache_dtype` "auto" stores K and
    V in the model's dtype, "int8" in a byte a number and a scale per token and head, not exactly
    (`performance.compare_kv_caches` says what that changes).
    `kv_placement` is where a sequence's blocks may lie: "scattered", "contiguous" or "prefer_contiguous".

    Sharing. `enable_prefix_caching` keeps computed prompts for later ones that begin alike, found by `prefix_cache`
    ("hash": whole blocks; "radix": single tokens); `eviction_policy` ("lru", "fifo", "lfu" or "none") says which
    are given up when room is needed.

    Scheduling. A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences.
    `scheduling_policy` is "fcfs" or "priority"; `batching` is "continuous", or "static" or "prefill_first" for
    comparison. Long prompts are computed in chunks (`enable_chunked_prefill`), of at most
    `long_prefill_token_threshold` tokens a step if that is not 0. `watermark` is the share of the blocks that admitting
    a request leaves free. When the cache is full a sequence is preempted by `preemption_mode`: "recompute", "swap" (to
    `swap_space`) or "auto" (whichever should be faster by `preemption_costs`, which
    `performance.preemption_costs.measure_preemption_costs` measures; None means those of a small model on two cores).
    `target_inter_token_latency`, in seconds, makes the engine shrink the steps that take longer.

    Attention. `attention_backend` is the name of one of `vllm_teach.backends`, or "auto", which selects for each call.
    `attention_pattern` lets a query see only some keys (a pattern of `vllm_teach.attention.patterns` that is causal),
    in prefill and in decode; blocks that no later query can see are given back.

    `seed` drives the requests that have none of their own. `max_events` is how many events `engine.events` keeps, the
    newest ones; None keeps all.
    """

    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    seed: int = 0
    block_size: int = 16
    num_kv_blocks: int | None = None
    swap_space: float = 0
    swap_file: str | Path | None = None
    kv_cache_dtype: str = "auto"
    kv_placement: str = "scattered"
    enable_prefix_caching: bool = True
    prefix_cache: str = "hash"
    eviction_policy: str = "lru"
    scheduling_policy: str = "fcfs"
    batching: str = "continuous"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    preemption_mode: str = "recompute"
    preemption_costs: PreemptionCosts | None = None
    target_inter_token_latency: float | None = None
    attention_pattern: Pattern | None = None
    max_events: int | None = 200_000

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        for name in ("kv_cache_memory_bytes", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.max_events is not None:
            hint = f"use a whole number from 1 to {sys.maxsize}, or None for all"
            check_whole("max_events", self.max_events, 1, sys.maxsize, hint=hint)
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 2)
        check_step_limits(self)
        hint = "use a number above 0 and at most 1"
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True, hint=hint)
        if not isinstance(self.attention_backend, str):
            refuse("attention_backend", self.attention_backend, "use the name of a backend or 'auto'")
        check_seed(self.seed)
        check_whole("block_size", self.block_size, 1)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        if not isinstance(self.preemption_costs, PreemptionCosts | None):
            refuse("preemption_costs", self.preemption_costs, "use PreemptionCosts or None")
        self._check_swap()

    def _check_swap(self) -> None:
        most = sys.maxsize >> 30  # what an address can say
        check_number("swap_space", self.swap_space, 0, most, hint=f"use a number of GiB from 0 to {most}")
        if self.swap_file is not None and not isinstance(self.swap_file, str | Path):
            refuse("swap_file", self.swap_file, "use a path or None")
        if self.swap_space == 0:
            if self.preemption_mode == "swap":
                refuse("swap_space", self.swap_space, "preemption_mode='swap' needs room to swap to, so give some GiB")
            if self.swap_file is not None:
                refuse("swap_space", self.swap_space, "swap_file is for swapping, so give some GiB")


_CHOICES = {
    "kv_cache_dtype": ("auto", "int8"),
    "kv_placement": PLACEMENTS,
    "prefix_cache": tuple(PREFIX_CACHES),
    "eviction_policy": EVICTION_POLICIES,
    "scheduling_policy": POLICIES,
    "preemption_mode": PREEMPTIONS,
}


@dataclass(frozen=True)
class StepStats:
    """What the last step did: tokens computed by kind, sequences in it, seconds it took."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    seconds: float
