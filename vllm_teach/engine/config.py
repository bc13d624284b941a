"""An engine's limits, and what it tells of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_teach.engine.failure import shown
from vllm_teach.errors import InvalidArgumentError

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
    file that is mapped into memory. `kv_placement` is where a sequence's blocks may lie: "scattered", "contiguous" or
    "prefer_contiguous".

    Sharing. `enable_prefix_caching` keeps computed prompts for later ones that begin alike, found by `prefix_cache`
    ("hash": whole blocks; "radix": single tokens); `eviction_policy` ("lru", "fifo", "lfu" or "none") says which
    are given up when room is needed.

    Scheduling. A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences.
    `scheduling_policy` is "fcfs" or "priority"; `batching` is "continuous", or "static" or "prefill_first" for
    comparison. Long prompts are computed in chunks (`enable_chunked_prefill`), of at most
    `long_prefill_token_threshold` tokens a step if that is not 0. `watermark` is the share of the blocks that admitting
    a request leaves free. When the cache is full a sequence is preempted by `preemption_mode`: "recompute", "swap" (to
    `swap_space`) or "auto" (whichever should be faster). `target_inter_token_latency`, in seconds, makes the engine
    shrink the steps that take longer.

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
    target_inter_token_latency: float | None = None
    attention_pattern: Pattern | None = None
    max_events: int | None = 200_000

    def __post_init__(self) -> None:
        for name in ("kv_cache_memory_bytes", "num_kv_blocks", "max_events"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            _check_whole("max_model_len", self.max_model_len, 2)
        check_batch_limits(self.max_num_seqs, self.max_num_batched_tokens)
        _check_real("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, "use a number above 0 and at most 1")
        if not isinstance(self.attention_backend, str):
            _refuse("attention_backend", self.attention_backend, "use the name of a backend or 'auto'")
        _check_whole("seed", self.seed)
        _check_whole("block_size", self.block_size, 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), f"use {' or '.join(map(repr, choices))}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "use True or False")
        _check_whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            hint = "without enable_chunked_prefill prompts are computed whole, so leave it 0"
            _refuse("long_prefill_token_threshold", self.long_prefill_token_threshold, hint)
        if not _is_real(self.watermark) or not 0 <= self.watermark < 1:
            _refuse("watermark", self.watermark, "use a number from 0 and below 1")
        if self.target_inter_token_latency is not None:
            latency = self.target_inter_token_latency
            _check_real("target_inter_token_latency", latency, 0, math.inf, "use a number of seconds above 0, or None")
        self._check_swap()

    def _check_swap(self) -> None:
        if not _is_real(self.swap_space) or not 0 <= self.swap_space < math.inf:
            _refuse("swap_space", self.swap_space, "use a number of GiB from 0")
        if self.swap_file is not None and not isinstance(self.swap_file, str | Path):
            _refuse("swap_file", self.swap_file, "use a path or None")
        if self.swap_space == 0:
            if self.preemption_mode == "swap":
                _refuse("swap_space", self.swap_space, "preemption_mode='swap' needs room to swap to, so give some GiB")
            if self.swap_file is not None:
                _refuse("swap_space", self.swap_space, "swap_file is for swapping, so give some GiB")


_CHOICES = {
    "kv_placement": ("scattered", "contiguous", "prefer_contiguous"),
    "prefix_cache": ("hash", "radix"),
    "eviction_policy": ("lru", "fifo", "lfu", "none"),
    "scheduling_policy": ("fcfs", "priority"),
    "batching": ("continuous", "static", "prefill_first"),
    "preemption_mode": ("recompute", "swap", "auto"),
}


@dataclass(frozen=True)
class StepStats:
    """What the last step did: tokens computed by kind, sequences in it, seconds it took."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    seconds: float


def check_batch_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise InvalidArgumentError unless a step has room for a token of every running sequence."""
    _check_whole("max_num_seqs", max_num_seqs, 1)
    _check_whole("max_num_batched_tokens", max_num_batched_tokens, 1)
    if max_num_batched_tokens < max_num_seqs:
        _refuse(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"every running sequence takes a token a step, so use at least max_num_seqs, which is {max_num_seqs}",
        )


def _check_whole(name: str, value: object, low: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or (low is not None and int(value) < low):
        _refuse(name, value, "use a whole number" + ("" if low is None else f" from {low}"))


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_real(name: str, value: Any, above: float, most: float, hint: str) -> None:
    if not _is_real(value) or not above < value <= most or value == math.inf:
        _refuse(name, value, hint)


def _refuse(name: str, value: object, hint: str) -> None:
    raise InvalidArgumentError(f"{name}={shown(value)} is not valid: {hint}.")
