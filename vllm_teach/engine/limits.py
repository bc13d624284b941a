"""Where an engine's limits meet the model: the context, the attention backend, the size of the KV cache."""

from __future__ import annotations

import torch

from vllm_teach import backends
from vllm_teach.attention.variant import merge_masks
from vllm_teach.backends.dispatch import AUTO
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.device import kv_cache_budget
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import window_size
from vllm_teach.models.config import ModelConfig


def check_limits(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidArgumentError if this model cannot run under `config` on this machine. Needs no weights."""
    if config.max_model_len is not None and config.max_model_len > shape.max_position:
        raise InvalidArgumentError(
            f"max_model_len={config.max_model_len} is not valid: this model's context allows 2 to {shape.max_position}."
        )
    if config.attention_backend != AUTO:  # which finds one for every call
        _check_backend(config, shape, dtype, device)


def _check_backend(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    spec = AttentionSpec(
        q_len=1,
        kv_len=config.max_model_len or shape.max_position,  # the longest, which a window would hide some of
        batch=1,
        q_heads=shape.num_q_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device.type,
        pattern=merge_masks(True, window_size(shape.sliding_window if any(shape.sliding_layers) else None)),
    )
    backend = backends.get(config.attention_backend)
    reason = backend.unavailable() or backend.supports(spec)
    if reason is not None:
        raise InvalidArgumentError(
            f"attention_backend={config.attention_backend!r} is not usable here ({reason}): use 'sdpa'."
        )


def choose_cache_bytes(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes for K and V: what `config` says, or what is free now. Asked when the weights are loaded.

    Raises InvalidArgumentError if that is less than a prompt of one token and one new token need.
    """
    token_bytes = shape.kv_bytes_per_token(dtype.itemsize)
    chosen = config.kv_cache_memory_bytes
    if chosen is None:
        most = config.max_num_seqs * (config.max_model_len or shape.max_position)
        chosen = min(most * token_bytes, kv_cache_budget(device, config.gpu_memory_utilization))
    if chosen < 2 * token_bytes:
        raise InvalidArgumentError(
            f"kv_cache_memory_bytes={chosen} is not enough for two tokens of {token_bytes} bytes: give the cache more."
        )
    return chosen


def choose_max_model_len(config: EngineConfig, shape: ModelConfig, num_slots: int) -> int:
    """Return how long prompt and output may be together, in tokens.

    Raises InvalidArgumentError if `config` asks for more than the `num_slots` tokens that the cache holds.
    """
    if config.max_model_len is None:
        return min(shape.max_position, num_slots)
    if config.max_model_len > num_slots:
        raise InvalidArgumentError(
            f"max_model_len={config.max_model_len} does not fit: the KV cache holds {num_slots} tokens, so lower it or "
            "give the cache more memory."
        )
    return config.max_model_len
