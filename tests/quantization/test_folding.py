"""Folding must leave a model that is not quantised as it is: the division and the multiplication cancel."""

import pytest
import torch

from vllm_teach.models import Decoder
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.quantization.folding import divide_rows, fold_scales
from vllm_teach.quantization.layered_model import read_weight
from vllm_teach.quantization.rounding import quantize_rtn

CONFIGS = [
    ModelConfig("LlamaForCausalLM", 40, 32, 48, 1, 4, 2, 8, 64),  # two query heads read each value head
    ModelConfig("LlamaForCausalLM", 40, 32, 48, 1, 4, 4, 8, 64),
    ModelConfig("LlamaForCausalLM", 40, 32, 48, 1, 4, 1, 8, 64, attention_bias=True, mlp_bias=True),
    ModelConfig("Qwen3ForCausalLM", 40, 32, 48, 1, 4, 2, 8, 64, qk_norm=True),
]


def decoder(config, dtype=torch.float32):
    model = Decoder(config).init_random(seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data.add_((0.2 * torch.randn(parameter.shape, generator=generator)).to(dtype))
    return model


def random_scales(stage, seed):
    sources = torch.rand(int(stage.source.max()) + 1, generator=torch.Generator().manual_seed(seed)) * 3 + 0.3
    return sources[stage.source]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_unquantised_layer_computes_what_it_did(config, dtype):
    layered = LayeredDecoder(decoder(config, dtype))
    plain, folded = layered.layer(0), layered.layer(0)
    ids = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(3))
    before, after = layered.embed(ids), layered.embed(ids)
    applied, tensors = [], {}
    for seed, stage in enumerate(folded.stages):
        scales = fold_scales(folded, stage, random_scales(stage, seed), {}, tensors)
        assert not torch.allclose(scales, torch.ones_like(scales))
        for name in stage.linears:
            # Without rounding to the model's dtype, which is another matter.
            folded.tensor(f"{name}.weight").mul_(scales)
        applied.append(scales)
    # In bfloat16, rows and biases that are divided are rounded once more; norms are made up for exactly.
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for inputs, divided, scales in zip(plain.walk(before), folded.walk(after), applied, strict=True):
        torch.testing.assert_close(divided * scales, inputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
    assert {"model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.v_proj.weight"} <= tensors.keys()


def test_a_norm_rounded_to_bfloat16_is_made_up_for_exactly():
    layered = LayeredDecoder(decoder(CONFIGS[0], torch.bfloat16))
    layer = layered.layer(0)
    stage, tensors = layer.stages[0], {}
    old = layer.tensor("model.layers.0.input_layernorm.weight").clone()
    asked = random_scales(stage, 0)
    scales = fold_scales(layer, stage, asked, {}, tensors)
    new = tensors["model.layers.0.input_layernorm.weight"]
    assert torch.equal(new, new.bfloat16().float())
    torch.testing.assert_close(new * scales, old, rtol=1e-6, atol=0)
    assert (scales / asked - 1).abs().max() < 2**-8


def test_a_norm_entry_of_zero_stays_zero():
    model = decoder(CONFIGS[0])
    model.model.layers[0].input_layernorm.weight.data[3] = 0
    layer = LayeredDecoder(model).layer(0)
    tensors = {}
    scales = fold_scales(layer, layer.stages[0], random_scales(layer.stages[0], 0), {}, tensors)
    assert scales.isfinite().all()
    assert tensors["model.layers.0.input_layernorm.weight"][3] == 0


def test_a_quantised_operator_keeps_its_codes():
    layer = LayeredDecoder(decoder(CONFIGS[0])).layer(0)
    name, stage = "model.layers.0.self_attn.v_proj", layer.stages[1]
    before = quantize_rtn(read_weight(layer, name), group_size=8)
    weights, tensors = {name: before}, {}
    scales = fold_scales(layer, stage, random_scales(stage, 4), weights, tensors)
    assert tensors == {}
    assert torch.equal(weights[name].codes, before.codes)
    divisors = torch.ones(16)
    divisors[stage.source] = scales
    torch.testing.assert_close(
        weights[name].dequantize() * divisors[:, None], before.dequantize(), rtol=2**-11, atol=1e-7
    )
    assert torch.equal(read_weight(layer, name), weights[name].dequantize())


def test_divided_scales_stay_positive_and_finite():
    weight = quantize_rtn(torch.full((2, 8), 1e-6), granularity="channel")
    scales = divide_rows(weight, torch.tensor([1e9, 1e-15])).scales
    assert (scales > 0).all()
    assert scales.isfinite().all()
