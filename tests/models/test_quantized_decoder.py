"""Quantised checkpoints in every layout: the logits are those of a plain decoder with the dequantised weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_teach.errors import InvalidArgumentError, ModelLoadError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_model
from vllm_teach.quantization.checkpoint import pack_weight
from vllm_teach.quantization.linear import QuantizedEmbedding, QuantizedLinear
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.quantized_weight import QuantizedWeight

GPTQ = QuantizationConfig("gptq", 4, 16, "gptq")
CASES = {
    "awq": ("llama", {}, QuantizationConfig("awq", 4, 32, "awq")),
    "gptq": ("llama", {}, GPTQ),
    "gptq, whole rows, 8 bits": ("llama", {}, QuantizationConfig("gptq", 8, None, "gptq")),
    "gptq 2, act-order": ("llama", {}, QuantizationConfig("gptq", 4, 16, "gptq_v2", act_order=True)),
    "rtn, 3 bits": ("llama", {"mlp_bias": True, "attention_bias": True}, QuantizationConfig("rtn", 3, 32)),
    "rtn, int8 head": ("llama", {}, QuantizationConfig("rtn", 4, 32, head_bits=8)),
    "int8, int8 head, tied": (
        "llama",
        {"tie_word_embeddings": True},
        QuantizationConfig("int8", 8, None, head_bits=8),
    ),
    "qwen2, which has biases": ("qwen2", {}, QuantizationConfig("awq", 4, 32, "awq")),
    "qwen3": ("qwen3", {"head_dim": 32}, GPTQ),
    "mistral": ("mistral", {"sliding_window": 11}, GPTQ),
}


def random_weight(shape: torch.Size, bits: int, group_size: int | None, act_order: bool) -> QuantizedWeight:
    out, size = shape
    groups = 1 if group_size is None else size // group_size
    middle = 2 ** (bits - 1)
    return QuantizedWeight(
        codes=torch.randint(0, 2**bits, shape, dtype=torch.uint8),
        scales=((torch.rand(out, groups) + 0.5) * 0.4 / 2**bits).half(),
        zeros=(middle + torch.randint(-1, 2, (out, groups))).to(torch.uint8),
        bits=bits,
        group_of=(torch.randperm(size) % groups).int() if act_order else None,
    )


@pytest.fixture
def quantized(tmp_path: Path, tiny_hf: Callable) -> Callable[..., tuple[Path, Decoder]]:
    """make(family, config, change=..., **overrides) -> (a quantised model's folder, the plain decoder it stands for).

    Its matrices are drawn at random. `change` may alter the tensors of the folder, in place.
    """

    def make(
        family: str,
        config: QuantizationConfig,
        change: Callable[[dict[str, torch.Tensor]], object] = len,
        **overrides: object,
    ) -> tuple[Path, Decoder]:
        tiny_hf(family, **overrides).save_pretrained(tmp_path)
        plain = load_model(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        for name, parameter in plain.named_parameters():
            module = name.removesuffix(".weight")
            is_head = module in ("model.embed_tokens", "lm_head")
            if not name.endswith("_proj.weight") and not (is_head and config.head_bits == 8):
                continue
            size = None if is_head else config.group_size
            weight = random_weight(parameter.shape, config.bits_of(module), size, config.act_order and not is_head)
            tensors.update(pack_weight(module, weight, config))
            del tensors[name]
            parameter.data.copy_(weight.dequantize())
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config.to_hf()}))
        return tmp_path, plain

    return make


def logits(model: Decoder, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tokens = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
    return model.logits(model(tokens, torch.arange(40), full_causal("sdpa"))).to(dtype)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_weights(case, quantized):
    family, overrides, config = CASES[case]
    folder, plain = quantized(family, config, **overrides)
    model, expected = load_model(folder), logits(plain)
    assert expected.std() > 0.1
    assert (logits(model) - expected).abs().max() <= 1e-4
    model.join_weights()
    assert (logits(model) - expected).abs().max() <= 1e-4
    attention = model.model.layers[1].self_attn
    shared = {id(each.packed) for each in (attention.q_proj, attention.k_proj, attention.v_proj)}
    # Each layer here draws an order of its own, so the orders of q, k and v differ.
    assert len(shared) == (3 if config.act_order else 1)


@pytest.mark.parametrize("case", ["awq", "int8, int8 head, tied"])
def test_in_bfloat16_the_error_is_that_of_plain_bfloat16(case, quantized):
    family, overrides, config = CASES[case]
    folder, plain = quantized(family, config, **overrides)
    model, exact = load_model(folder, torch.bfloat16).join_weights(), logits(plain)
    assert model.dtype == torch.bfloat16
    error, allowed = (logits(each, torch.float32) - exact for each in (model, plain.bfloat16()))
    assert error.abs().max() <= 2 * allowed.abs().max() + 1e-5


def test_sizes_are_counted(quantized):
    folder, plain = quantized("llama", QuantizationConfig("int8", 8, None, head_bits=8))
    model = load_model(folder, torch.bfloat16)
    assert model.num_parameters() == plain.num_parameters()
    bfloat16 = 2 * plain.num_parameters()
    assert plain.num_bytes() == 2 * bfloat16
    # A byte for a weight, 3 for a row's scale and zero (more for padding), 2 for an entry of a norm.
    assert 0.5 * bfloat16 < model.num_bytes() < 0.58 * bfloat16
    before = model.num_bytes()
    assert abs(model.join_weights().num_bytes() - before) < 0.02 * before
    assert isinstance(model.model.embed_tokens, QuantizedEmbedding)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert "bits=8" in repr(model)


NAME = "model.layers.1.mlp.up_proj"


def test_a_missing_tensor_is_named(quantized):
    folder, _ = quantized("llama", GPTQ, lambda tensors: tensors.pop(f"{NAME}.scales"))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(NAME)}.*scales"):
        load_model(folder)


def test_a_missing_layer_is_named(quantized):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(NAME)]:
            del tensors[name]

    with pytest.raises(ModelLoadError, match=rf"tensor {NAME}\.weight is missing from"):
        load_model(quantized("llama", GPTQ, drop)[0])


def test_a_wrong_shape_is_named(quantized):
    def swap(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"{NAME}.{part}"] = tensors[f"{NAME.replace('up', 'down')}.{part}"].clone()

    with pytest.raises(ModelLoadError, match=rf"{NAME} in .*weight has shape \[64, 96\], but {NAME} has \[96, 64\]"):
        load_model(quantized("llama", GPTQ, swap)[0])


def test_a_layer_that_the_model_lacks_is_named(quantized):
    def add(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"model.extra.{part}"] = tensors[f"{NAME}.{part}"].clone()

    with pytest.raises(ModelLoadError, match=r"model\.extra in .* is no plain linear layer"):
        load_model(quantized("llama", GPTQ, add)[0])


def test_empty_biases_of_old_gptq_files_are_passed_over_and_others_are_not(quantized):
    folder, plain = quantized("llama", GPTQ, lambda tensors: tensors.update({f"{NAME}.bias": torch.zeros(96)}))
    assert (logits(load_model(folder)) - logits(plain)).abs().max() <= 1e-4
    folder, _ = quantized("llama", GPTQ, lambda tensors: tensors.update({f"{NAME}.bias": torch.ones(96)}))
    with pytest.raises(ModelLoadError, match=rf"tensor {NAME}\.bias in .* has no place"):
        load_model(folder)


def test_a_layer_may_be_left_as_it_was(quantized):
    """AutoAWQ's modules_to_not_convert."""
    plain_weight = torch.randn(96, 64) * 0.1

    def restore(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{NAME}.{part}"]
        tensors[f"{NAME}.weight"] = plain_weight

    folder, plain = quantized("llama", GPTQ, restore)
    plain.get_parameter(f"{NAME}.weight").data.copy_(plain_weight)
    assert (logits(load_model(folder).join_weights()) - logits(plain)).abs().max() <= 1e-4


def test_unknown_kinds_of_quantisation_are_named(quantized):
    folder, _ = quantized("llama", GPTQ)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelLoadError, match="fp8"):
        load_model(folder)


def test_quantised_tensors_without_a_word_in_the_config_are_refused(quantized):
    folder, _ = quantized("llama", GPTQ)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\..*weight is missing"):
        load_model(folder)


def test_what_cannot_be_put_into_a_model(quantized):
    _, model = quantized("llama", GPTQ)
    weight = random_weight(torch.Size((96, 64)), 4, 16, False)
    for name in ("model.norm", "nowhere", "model.layers.1.mlp", ""):
        with pytest.raises(InvalidArgumentError, match=f"name={name!r} is no plain linear layer or embedding"):
            model.put_quantized(name, weight, torch.float32)
    with pytest.raises(InvalidArgumentError, match=r"weight has shape \[96, 64\], but lm_head has \[320, 64\]"):
        model.put_quantized("lm_head", weight, torch.float32)
    model.put_quantized(NAME, weight, torch.float32)
    with pytest.raises(InvalidArgumentError, match="is no plain linear layer"):
        model.put_quantized(NAME, weight, torch.float32)
