"""A decoder layer by layer against the decoder as a whole, with hooks that see what its linear layers are given."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import Decoder, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.quantization.layered_model import LayerResult, read_weight
from vllm_teach.quantization.rounding import quantize_rtn

CONFIG = ModelConfig("LlamaForCausalLM", 40, 32, 48, 3, 4, 2, 8, 64)
VARIANTS = {
    "llama": CONFIG,
    "qwen2": ModelConfig("Qwen2ForCausalLM", 40, 32, 48, 3, 4, 2, 8, 64, attention_bias=True),
    "qwen3": ModelConfig("Qwen3ForCausalLM", 40, 32, 48, 3, 4, 1, 8, 64, qk_norm=True),
    "mistral": ModelConfig(
        "MistralForCausalLM", 40, 32, 48, 3, 4, 4, 8, 64, sliding_window=5, sliding_layers=(True, False, True)
    ),
}
IDS = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))


def decoder(config=CONFIG, dtype=torch.float32):
    model = Decoder(config).init_random(seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():  # norms and biases that are no ones and zeros
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(dtype))
        elif "layers" in name:
            parameter.data.mul_(10)
    return model


def seen_by_linears(model, ids):
    """{linear layer: what it is given for each of `ids`}, by hooks, from the decoder's own forward pass."""
    seen = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: seen.setdefault(name, []).append(given[0].clone()))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    states = [model(sample, torch.arange(len(sample)), full_causal()) for sample in ids]
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(each) for name, each in seen.items()}, torch.stack(states)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_walk_shows_what_each_linear_layer_is_given(kind):
    model = decoder(VARIANTS[kind])
    seen, last = seen_by_linears(model, IDS)
    layered = LayeredDecoder(model)
    states = layered.embed(IDS)
    names = []
    for index in range(layered.num_layers):
        layer = layered.layer(index)
        for stage, inputs in zip(layer.stages, layer.walk(states), strict=True):
            for name in stage.linears:
                names.append(name)
                torch.testing.assert_close(inputs, seen[name], rtol=1e-4, atol=1e-5)
                assert read_weight(layer, name).shape[1] == inputs.shape[-1] == len(stage.source)
    assert sorted(names) == sorted(seen), "every linear layer of every layer has one stage"
    torch.testing.assert_close(model.model.norm(states), last, rtol=1e-4, atol=1e-5)


def test_what_is_replaced_on_the_way_is_computed_with():
    model, changed = decoder(), decoder()
    generator = torch.Generator().manual_seed(5)
    new = {
        name: torch.randn(parameter.shape, generator=generator) * 0.2
        for name, parameter in model.named_parameters()
        if "layers.1." in name
    }
    layered = LayeredDecoder(model)
    states = layered.embed(IDS)
    for _ in layered.layer(0).walk(states):
        pass
    layer = layered.layer(1)
    for stage, _ in zip(layer.stages, layer.walk(walked := states.clone()), strict=True):
        for name in [f"{each}.weight" for each in (*stage.linears, stage.previous)]:
            layer.replace(name, new[name])
    for name, tensor in new.items():
        changed.get_parameter(name).data.copy_(tensor)
    again = LayeredDecoder(changed)
    for _ in again.layer(1).walk(states):
        pass
    torch.testing.assert_close(walked, states)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, decoder().model.layers[1].mlp.up_proj.weight)


def test_samples_may_be_walked_in_parts():
    layered = LayeredDecoder(decoder())
    whole, parts = layered.embed(IDS), layered.embed(IDS)
    layer = layered.layer(0)
    walks = [layer.walk(part) for part in parts.split(2)]
    for inputs in layer.walk(whole):
        torch.testing.assert_close(torch.cat([next(walk) for walk in walks]), inputs)
    for walk in walks:
        assert next(walk, None) is None
    torch.testing.assert_close(parts, whole)


def test_apply_puts_a_result_into_the_decoder_and_a_working_layer_computes_with_the_same():
    model = decoder(dtype=torch.bfloat16)
    layered = LayeredDecoder(model)
    name, norm = "model.layers.1.mlp.up_proj", "model.layers.1.input_layernorm.weight"
    working = layered.layer(1)
    weight = quantize_rtn(read_weight(working, name), group_size=8)
    working.replace(f"{name}.weight", weight.dequantize())
    working.replace(norm, torch.full((32,), 1 / 3))
    before = model.model.layers[1].mlp.up_proj.weight
    layered.apply(LayerResult(1, {name: weight}, {norm: working.tensor(norm)}, {}))
    there = model.model.layers[1].mlp.up_proj.weight
    assert there is before
    assert torch.equal(there, weight.dequantize(torch.bfloat16))
    for parameter in (f"{name}.weight", norm):
        assert torch.equal(layered.layer(1).tensor(parameter), working.tensor(parameter)), "bit for bit"


def test_parameters_that_a_layer_lacks():
    layer = LayeredDecoder(decoder()).layer(0)
    assert layer.tensor("model.layers.0.self_attn.v_proj.bias") is None
    assert layer.tensor("model.layers.0.input_layernorm.bias") is None
    with pytest.raises(InvalidArgumentError, match=r"linear='.*mlp' has no weight"):
        read_weight(layer, "model.layers.0.mlp")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.full((1, 4), 40), "token_ids holds 40 to 40; this model's ids are 0 to 39"),
        (torch.zeros(1, 65, dtype=torch.int64), "samples of 65 tokens; this model's context is 64"),
    ],
)
def test_ids_that_the_model_lacks_are_refused(ids, words):
    with pytest.raises(InvalidArgumentError, match=words):
        LayeredDecoder(decoder()).embed(ids)
