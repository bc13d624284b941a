"""An engine's limits, and what it tells of a step."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from vllm_teach.engine.failure import shown
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine, each checked on construction: InvalidArgumentError names the bad one.

    `kv_cache_memory_bytes` is the budget for K and V over all layers. None means `gpu_memory_utilization` of the free
    memory of a GPU, or a quarter of the available memory of a CPU-only machine, but no more than `max_num_seqs`
    sequences of `max_model_len` tokens need. `max_model_len` None means the model's context, or what the cache holds if
    that is less. `attention_backend` is the name of one of `vllm_teach.backends`, or "auto", which selects for each
    call. `seed` drives the requests that have none of their own.
    """

    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "sdpa"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv_cache_memory_bytes is not None:
            _check_whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.max_model_len is not None:
            _check_whole("max_model_len", self.max_model_len, 2)
        check_batch_limits(self.max_num_seqs, self.max_num_batched_tokens)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            _refuse("gpu_memory_utilization", share, "use a number above 0 and at most 1")
        if not isinstance(self.attention_backend, str):
            _refuse("attention_backend", self.attention_backend, "use the name of a backend or 'auto'")
        _check_whole("seed", self.seed)


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


def _refuse(name: str, value: object, hint: str) -> None:
    raise InvalidArgumentError(f"{name}={shown(value)} is not valid: {hint}.")
