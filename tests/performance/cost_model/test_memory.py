"""Bytes against models, caches and traces of memory that are really there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_teach import data
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.limits import choose_num_blocks
from vllm_teach.engine.llm import LLM
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_model
from vllm_teach.models.shard import Shard
from vllm_teach.models.sharded_decoder import ShardedDecoder
from vllm_teach.parallel.group import Group
from vllm_teach.performance.cost_model.memory import (
    activation_bytes,
    kv_bytes_per_token,
    split_device_memory,
    weight_bytes,
)
from vllm_teach.performance.cost_model.weight_format import WeightFormat, get_weight_format
from vllm_teach.performance.hardware import get_hardware
from vllm_teach.performance.memory import peak_memory
from vllm_teach.performance.model_shapes import get_model_shape
from vllm_teach.quantization.rounding import quantize_rtn

CONFIG = ModelConfig("LlamaForCausalLM", 300, 128, 320, 3, 4, 2, 32, 512)
EVERYTHING = replace(CONFIG, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True)
A100 = get_hardware("a100-80gb-sxm")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [CONFIG, EVERYTHING])
def test_weights_are_those_of_a_decoder(config: ModelConfig, tied: bool) -> None:
    config = replace(config, tie_word_embeddings=tied)
    assert weight_bytes(config, "float32") == Decoder(config).num_bytes()
    assert weight_bytes(config, "bfloat16") == Decoder(config).to(torch.bfloat16).num_bytes()


def test_weights_of_the_tiny_and_of_the_real_model(smollm2_path: Path) -> None:
    for name, path in (("tiny", data.path("tiny-llama")), ("smollm2-135m", smollm2_path)):
        assert weight_bytes(get_model_shape(name), "bfloat16") == load_model(path, torch.bfloat16).num_bytes()


@pytest.mark.parametrize("weights", [WeightFormat("rtn", 4, 64), WeightFormat("int8", 8)])
def test_quantised_weights_are_those_of_a_decoder_whose_layers_are(weights: WeightFormat) -> None:
    model = Decoder(CONFIG).init_random()
    for name, parameter in list(model.named_parameters()):
        module = name.removesuffix(".weight")
        if name.startswith("model.layers.") and parameter.dim() == 2:
            found = quantize_rtn(parameter, weights.bits, group_size=weights.group_size)
            model.put_quantized(module, found, torch.float32)
    assert weight_bytes(CONFIG, "float32", weights) == model.join_weights().num_bytes()


def test_a_rank_has_its_share() -> None:
    for config in (CONFIG, EVERYTHING):
        shard = ShardedDecoder(Shard.of(config, 0, 2), Group(0, 2, 1.0))
        assert weight_bytes(config, "float32", tensor_parallel_size=2) == shard.num_bytes()


def test_llama_2_70b_in_half_precision_is_no_less_than_138_gb() -> None:
    assert weight_bytes(get_model_shape("llama-2-70b")) == pytest.approx(137.95e9, rel=1e-3)


def test_the_cache_is_the_engines() -> None:
    llm = LLM("tiny", device="cpu", dtype="bfloat16", num_kv_blocks=8)
    storage = llm.engine.runner.storage
    block = storage.keys[0][0].nbytes + storage.values[0][0].nbytes
    config = get_model_shape("tiny")
    assert 16 * kv_bytes_per_token(config) == config.num_layers * block
    assert kv_bytes_per_token(config, tensor_parallel_size=2) * 2 == kv_bytes_per_token(config)


@pytest.mark.parametrize(("tokens", "samples"), [(200, 0), (200, 1), (200, 200), (1, 1)])
@pytest.mark.parametrize("inner", [64, 320])
def test_activations_are_those_of_a_traced_forward_pass(tokens: int, samples: int, inner: int) -> None:
    config = replace(CONFIG, intermediate_size=inner)
    model, ids = Decoder(config).init_random().join_weights(), torch.arange(tokens)

    def step() -> object:
        hidden = model(ids.clone(), ids.clone(), full_causal("cpu"))
        return model.logits(hidden[:samples]).float() if samples else None

    with torch.inference_mode():
        step()
        held = peak_memory(step)
    assert activation_bytes(config, tokens, samples, "float32") == pytest.approx(held, rel=0.02)


def test_the_naive_attention_holds_its_scores() -> None:
    model, ids = Decoder(CONFIG).init_random(), torch.arange(200)
    with torch.inference_mode():
        held = peak_memory(lambda: model(ids, ids, full_causal("naive")))
    assert activation_bytes(CONFIG, 200, 0, "float32", scores=200**2) == pytest.approx(held, rel=0.5)


def test_a_device_is_shared_out_without_a_rest() -> None:
    config = get_model_shape("llama-2-70b")
    found = split_device_memory(config, A100, tensor_parallel_size=8, gpu_memory_utilization=0.9)
    assert found.usable == int(0.9 * A100.memory_bytes)
    rest = found.usable - found.weights - found.activations - found.kv_cache
    assert 0 <= rest < found.block_bytes
    assert found.block_bytes == 16 * 80 * 2 * 128 * 2  # tokens, layers, K and V of one head
    assert found.kv_cache == found.num_blocks * found.block_bytes


def test_an_engine_with_that_budget_has_as_many_blocks() -> None:
    config = get_model_shape("llama-2-7b")
    found = split_device_memory(config, A100)
    engine = EngineConfig(kv_cache_memory_bytes=found.kv_cache)
    assert choose_num_blocks(engine, config, torch.bfloat16, torch.device("cpu")) == found.num_blocks


def test_quantised_weights_leave_room_for_more_blocks() -> None:
    config = get_model_shape("llama-2-7b")
    small = split_device_memory(config, A100, weights=get_weight_format("awq", "bfloat16"))
    assert small.num_blocks > split_device_memory(config, A100).num_blocks


def test_what_does_not_fit_says_how_many_devices_would() -> None:
    config = get_model_shape("llama-2-70b")
    with pytest.raises(InvalidArgumentError, match=r"tensor_parallel_size=1 .* 138.0 GB, .* use 2 devices"):
        split_device_memory(config, A100)
    with pytest.raises(InvalidArgumentError, match="use larger devices"):
        split_device_memory(get_model_shape("gpt-3-175b-like"), get_hardware("l4"), gpu_memory_utilization=0.1)
    assert split_device_memory(config, A100, tensor_parallel_size=2).num_blocks > 0


def test_a_block_or_a_step_that_is_too_large_is_named() -> None:
    config = get_model_shape("llama-2-7b")
    with pytest.raises(InvalidArgumentError, match=r"a block of 1,000,000 tokens 524\.288 GB"):
        split_device_memory(config, A100, block_size=1_000_000)
    with pytest.raises(InvalidArgumentError, match=r"a step of 10,000,000 tokens \d{3,}\.\d GB"):
        split_device_memory(config, A100, max_num_batched_tokens=10_000_000)


def test_counts_of_devices_that_a_model_cannot_be_cut_into_are_no_advice() -> None:
    """Groups of 128 inputs do not fit the heads of half a layer: that was told instead of the missing room."""
    config = replace(CONFIG, intermediate_size=256)
    with pytest.raises(InvalidArgumentError, match=r"tensor_parallel_size=1 leaves no room .* so use larger devices"):
        split_device_memory(config, A100, weights=WeightFormat("gptq", 4, 128), gpu_memory_utilization=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1\.5"),
        ({"attention": "fast"}, "attention='fast'"),
        ({"dtype": "int4"}, "dtype='int4'"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        split_device_memory(get_model_shape("llama-2-7b"), A100, **wrong)  # type: ignore[arg-type]
