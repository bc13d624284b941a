"""Where an engine's limits meet the model: the context, the attention backend, the size of the KV cache."""

from __future__ import annotations

import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import Pattern
from vllm_teach.attention.variant import merge_masks
from vllm_teach.backends.dispatch import AUTO
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.device import kv_cache_budget
from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import check_choice
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.quantized_storage import packed_bytes
from vllm_teach.models.attend import window_size
from vllm_teach.models.config import ModelConfig
from vllm_teach.quantization.quantization_config import METHODS, QuantizationConfig


def check_quantization(quantization: str | None, found: QuantizationConfig | None, model: object) -> None:
    """Raise InvalidArgumentError unless `quantization` is None or names what `found` says of the files of `model`."""
    if quantization is None:
        return
    check_choice("quantization", quantization, METHODS)
    if found is None:
        raise InvalidArgumentError(
            f"quantization={quantization!r} does not fit model={shown(str(model))}, which is not quantised: leave it "
            "out, or quantise the model with `vllm-teach quantize` first."
        )
    if found.method != quantization:
        raise InvalidArgumentError(
            f"quantization={quantization!r} does not fit model={shown(str(model))}, which was quantised by "
            f"{found.method!r}: use quantization={found.method!r}, or leave it out."
        )


def check_limits(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidArgumentError if this model cannot run under `config` on this machine. Needs no weights."""
    if config.max_model_len is not None and config.max_model_len > shape.max_position:
        raise InvalidArgumentError(
            f"max_model_len={shown(config.max_model_len)} is not valid: this model's context allows 2 to "
            f"{shape.max_position}."
        )
    pattern = config.attention_pattern
    if pattern is not None and not isinstance(pattern, Pattern):
        raise InvalidArgumentError(
            f"attention_pattern={shown(pattern)} is not valid: use a pattern of vllm_teach.attention.patterns or None."
        )
    if config.attention_backend != AUTO:  # which finds one for every call
        _check_backend(config, shape, dtype, device)


def masks_of_layers(shape: ModelConfig, pattern: Pattern | None) -> set[Pattern]:
    """Return what the layers show their queries: causal, `pattern`, and the window of those that have one."""
    windows = {shape.sliding_window if slides else None for slides in shape.sliding_layers} or {None}
    masks = {merge_masks(True, window_size(window), pattern) for window in windows}
    return {mask for mask in masks if mask is not None}


def _check_backend(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    backend = backends.get(config.attention_backend)
    for mask in masks_of_layers(shape, config.attention_pattern):
        spec = AttentionSpec(
            q_len=1,
            kv_len=config.max_model_len or shape.max_position,  # the longest, which a window would hide some of
            batch=1,
            q_heads=shape.num_q_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device.type,
            pattern=mask,
            layout="paged",
            block_size=config.block_size,
        )
        reason = backend.unavailable() or backend.supports(spec)
        if reason is not None:
            raise InvalidArgumentError(
                f"attention_backend={config.attention_backend!r} is not usable here ({reason}): use 'sdpa'."
            )


def kv_bytes_per_token(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of K and V that one token holds over all layers, in the cache of an engine with this `config`.

    `dtype` is the model's.
    """
    if config.kv_cache_dtype == "int8":
        return 2 * shape.num_layers * shape.num_kv_heads * packed_bytes(shape.head_dim, dtype)
    return shape.kv_bytes_per_token(dtype.itemsize)


def choose_num_blocks(
    config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device, num_sharing: int = 1
) -> int:
    """Return how many blocks the KV cache has: as `config` says, or as many as fit into what is free now.

    Asked when the weights are loaded. `num_sharing` ranks have the memory of this device together. Raises
    InvalidArgumentError if they hold less than a prompt of one token and one new token.
    """
    block_bytes = config.block_size * kv_bytes_per_token(config, shape, dtype)
    least = -(-2 // config.block_size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < least:
            raise InvalidArgumentError(
                f"num_kv_blocks={config.num_kv_blocks} is not enough for two tokens: use at least {least}."
            )
        return config.num_kv_blocks
    chosen = config.kv_cache_memory_bytes
    if chosen is None:
        longest = -(-(config.max_model_len or shape.max_position) // config.block_size)
        budget = kv_cache_budget(device, config.gpu_memory_utilization) // num_sharing
        chosen = min(config.max_num_seqs * longest * block_bytes, budget)
    if chosen < least * block_bytes:
        raise InvalidArgumentError(
            f"kv_cache_memory_bytes={shown(chosen)} is not enough for two tokens: a block of "
            f"{shown(config.block_size)} tokens has {shown(block_bytes)} bytes, so give at least "
            f"{shown(least * block_bytes)} or use a smaller block_size."
        )
    return chosen // block_bytes


def check_pattern(pattern: Pattern | None, max_model_len: int) -> None:
    """Raise InvalidArgumentError if `pattern` says nothing of some position up to `max_model_len`.

    It would fail in the forward pass that gets there, and all requests of that step with it.
    """
    if pattern is not None:
        try:
            pattern.check(1, max_model_len)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"attention_pattern={shown(pattern)} is not valid with max_model_len={max_model_len} "
                f"({str(error).rstrip('.')}): make them fit."
            ) from error


def choose_num_host_blocks(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype) -> int:
    """Return how many blocks fit into `config.swap_space`. Raises InvalidArgumentError if it is too small for one."""
    block_bytes = config.block_size * kv_bytes_per_token(config, shape, dtype)
    blocks = int(config.swap_space * 2**30) // block_bytes
    if config.swap_space and not blocks:
        raise InvalidArgumentError(
            f"swap_space={config.swap_space} is less than one block of {shown(block_bytes)} bytes: use 0 or more GiB."
        )
    return blocks


def choose_max_model_len(config: EngineConfig, shape: ModelConfig, most: int) -> int:
    """Return how long prompt and output may be together, in tokens, where the KV cache can hold `most` of a sequence.

    Raises InvalidArgumentError if `config` asks for more.
    """
    if config.max_model_len is None:
        return min(shape.max_position, most)
    if config.max_model_len > most:
        raise InvalidArgumentError(
            f"max_model_len={shown(config.max_model_len)} does not fit: the KV cache holds {most} tokens of one "
            "sequence, so lower it or give the cache more memory."
        )
    return config.max_model_len
