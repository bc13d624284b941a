"""The parts of an engine, as its configuration and its model want them."""

from __future__ import annotations

from functools import partial, reduce
from operator import or_

from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.failure import shown
from vllm_teach.engine.limits import kv_bytes_per_token, masks_of_layers
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.engine.unseen import unseen_blocks
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.quantized_storage import QuantizedKVStorage
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.language_model import LanguageModel


def make_storage(config: EngineConfig, model: LanguageModel, num_blocks: int, num_host_blocks: int) -> KVStorage:
    """Return the tensors of the KV cache. Raises InvalidArgumentError when the machine has no room for them."""
    shape, dtype, device = model.config, model.dtype, model.device
    form = (config.block_size, shape.num_kv_heads, shape.head_dim)
    storage = QuantizedKVStorage if config.kv_cache_dtype == "int8" else KVStorage
    try:
        return storage(
            shape.num_layers,
            num_blocks,
            *form,
            dtype,
            device,
            num_host_blocks=num_host_blocks,
            swap_file=config.swap_file,
        )
    except InvalidArgumentError:  # the swap file's
        raise
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:  # PyTorch's, by the size
        if config.num_kv_blocks is None:
            size = num_blocks * config.block_size * kv_bytes_per_token(config, shape, dtype)
            told = f"kv_cache_memory_bytes={shown(config.kv_cache_memory_bytes or size)}"
        else:
            told = f"num_kv_blocks={shown(num_blocks)}"
        raise InvalidArgumentError(
            f"{told} does not fit: {device.type} has no room for a cache of that size beside "
            f"swap_space={shown(config.swap_space)}, so use a smaller one."
        ) from error


def make_scheduler_config(config: EngineConfig, model: LanguageModel, max_model_len: int) -> SchedulerConfig:
    """Return the scheduler's part of `config`, with what only the model knows: which blocks go out of sight."""
    shape = model.config
    # A block has its K and V of all layers, and can go when none of them sees it.
    seen = reduce(or_, masks_of_layers(shape, config.attention_pattern))
    forgets = bool(unseen_blocks(seen, max_model_len, 1))
    usual = PreemptionCosts(kv_bytes_per_token=kv_bytes_per_token(config, shape, model.dtype))
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.scheduling_policy,
        batching=config.batching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        preemption=config.preemption_mode,
        target_inter_token_latency=config.target_inter_token_latency,
        unseen=partial(unseen_blocks, seen, block_size=config.block_size) if forgets else None,
        costs=config.preemption_costs or usual,
    )
