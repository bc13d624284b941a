"""What a device's memory holds while it serves a model: weights, what a step computes with, and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_teach.engine.field_checks import check_number, check_whole
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.shard import Shard
from vllm_teach.performance.cost_model.attention_work import check_algorithm
from vllm_teach.performance.cost_model.operators import Operators
from vllm_teach.performance.cost_model.weight_format import WeightFormat, element_bytes
from vllm_teach.performance.hardware import HardwareSpec

_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: of its `total`, `usable` may be taken for `weights`, `activations` and the KV cache.

    The cache has `num_blocks` blocks of `block_bytes`, K and V of all layers.
    """

    total: int
    usable: int
    weights: int
    activations: int
    block_bytes: int
    num_blocks: int

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache."""
        return self.num_blocks * self.block_bytes


def weight_bytes(
    config: ModelConfig, dtype: str = "bfloat16", weights: WeightFormat | None = None, tensor_parallel_size: int = 1
) -> int:
    """Return the bytes of the weights on the device that has the most of them.

    Embedding, output matrix, norms and biases are in `dtype`, the layers' matrices as `weights` says, None for `dtype`.
    """
    operators = Operators(config, dtype, weights, tensor_parallel_size=tensor_parallel_size)
    local, size = operators.local, operators.element
    q, kv = local.num_q_heads * local.head_dim, local.num_kv_heads * local.head_dim
    vectors = 2 * local.hidden_size + (2 * local.head_dim if config.qk_norm else 0)
    vectors += (q + 2 * kv if config.attention_bias else 0) + (local.hidden_size if config.attention_out_bias else 0)
    vectors += 2 * local.intermediate_size + local.hidden_size if config.mlp_bias else 0
    embeddings = operators.vocabulary * local.hidden_size * (1 if config.tie_word_embeddings else 2)
    layers = local.num_layers * (operators.layer_bytes + vectors * size)
    return layers + (embeddings + local.hidden_size) * size


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16", tensor_parallel_size: int = 1) -> int:
    """Return the bytes of K and V of one token, all layers, on the device that has the most KV heads."""
    return Shard.of(config, 0, tensor_parallel_size).config.kv_bytes_per_token(element_bytes(dtype))


def activation_bytes(
    config: ModelConfig,
    tokens: int,
    samples: int,
    dtype: str = "bfloat16",
    *,
    tensor_parallel_size: int = 1,
    scores: int = 0,
) -> int:
    """Return the most bytes of intermediates that a step of `tokens` tokens, of which `samples` are drawn from, holds.

    The fullest moment of this package's decoder is one of three. In the MLP there are five tensors of the hidden size
    (the layer's two inputs, what attention gave, their sum and its normalised copy) and three of the inner size; in
    attention four, with q, k and v, q and k turned, what was read and its log-sum-exp; at the end the logits, and their
    copy in float32. `scores` are the pairs of one head of the longest sequence, for the naive attention, which keeps
    them and their softmax for all heads; others keep none. Positions and token ids are of 64 bits.
    """
    local, size = Shard.of(config, 0, tensor_parallel_size).config, element_bytes(dtype)
    q, kv = local.num_q_heads * local.head_dim, local.num_kv_heads * local.head_dim
    mlp = (5 * local.hidden_size + 3 * local.intermediate_size) * size
    attention = (4 * local.hidden_size + 3 * q + 3 * kv) * size + local.num_q_heads * _FLOAT32
    angles = local.head_dim * size  # a sine and a cosine for each pair of numbers
    layer = tokens * (max(mlp, attention) + angles) + 2 * scores * local.num_q_heads * size
    copied = _FLOAT32 if size < _FLOAT32 else 0
    logits = tokens * local.hidden_size * size + samples * config.vocab_size * (size + copied)
    return 2 * tokens * _INT64 + max(layer, logits)


def split_device_memory(
    config: ModelConfig,
    hardware: HardwareSpec,
    *,
    dtype: str = "bfloat16",
    weights: WeightFormat | None = None,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
    attention: str = "paged",
) -> DeviceMemory:
    """Return what is where: the KV cache gets what weights and the largest step leave of the usable memory.

    `gpu_memory_utilization` is the usable share of all memory, as in vLLM; this package's own engine takes its share of
    what is free once the weights are loaded. An assumption: what the driver, NCCL and CUDA graphs hold, a GB or two, is
    in the share that is not used; vLLM takes it from the usable one. Raises InvalidArgumentError, saying how many
    devices would do, when not even one block fits, and for arguments that cannot be.
    """
    check_algorithm(attention)
    check_whole("block_size", block_size, 1)
    hint = "use a number above 0 and at most 1"
    check_number("gpu_memory_utilization", gpu_memory_utilization, 0, 1, open_low=True, hint=hint)

    def fits(devices: int) -> bool:
        try:
            return split(devices).num_blocks > 0
        except InvalidArgumentError:  # a model that cannot be cut into so many parts
            return False

    def split(devices: int) -> DeviceMemory:
        usable = int(hardware.memory_bytes * gpu_memory_utilization)
        taken = weight_bytes(config, dtype, weights, devices)
        longest = min(max_num_batched_tokens, config.max_position)
        step = activation_bytes(
            config,
            max_num_batched_tokens,
            min(max_num_seqs, max_num_batched_tokens),
            dtype,
            tensor_parallel_size=devices,
            scores=longest**2 if attention == "naive" else 0,
        )
        block = block_size * kv_bytes_per_token(config, dtype, devices)
        return DeviceMemory(hardware.memory_bytes, usable, taken, step, block, max(0, usable - taken - step) // block)

    found = split(tensor_parallel_size)
    if found.num_blocks:
        return found
    more = range(tensor_parallel_size + 1, config.num_kv_heads + 1)
    enough = next((f"{devices} devices, " for devices in more if fits(devices)), "")
    raise InvalidArgumentError(
        f"tensor_parallel_size={tensor_parallel_size} leaves no room for a KV cache on {hardware.title}: of each, "
        f"{found.usable / 1e9:.1f} GB may be used, the weights take {found.weights / 1e9:.1f} GB, a step of "
        f"{max_num_batched_tokens:,} tokens {found.activations / 1e9:.1f} GB, a block of {block_size:,} tokens "
        f"{found.block_bytes / 1e9:.3f} GB, so use {enough}larger devices, quantised weights, or less of the largest."
    )
