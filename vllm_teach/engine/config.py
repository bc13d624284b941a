"""An engine's limits, and what it tells of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine. `kv_cache_bytes` is the budget for K and V over all layers; the rest counts tokens.

    `max_model_len` None means the model's context, or what the cache holds if that is less.
    """

    kv_cache_bytes: int
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    attention_backend: str = "sdpa"
    seed: int = 0


@dataclass(frozen=True)
class StepStats:
    """What the last step did: tokens computed by kind, sequences in it, seconds it took."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    seconds: float
