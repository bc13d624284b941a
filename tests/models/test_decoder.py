"""The decoder against transformers, on small random models of every supported kind, in float32."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from vllm_teach import counters
from vllm_teach.models.attend import full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layers import RMSNorm
from vllm_teach.models.rope import RotaryEmbedding

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that a wrong formula shows far above rounding.
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, own head_dim": LlamaConfig(**SIZES, head_dim=16),
    "llama, llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, linear rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "mistral, window": MistralConfig(**SIZES, sliding_window=7),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, one layer slides": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def pair(kind):
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(KINDS[kind], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model = Decoder(ModelConfig.from_hf(KINDS[kind].to_dict()))
    weights = {
        name: weight for name, weight in reference.state_dict().items() if name in dict(model.named_parameters())
    }
    model.load_state_dict(weights, assign=True)
    return reference, model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind):
    reference, model = pair(kind)
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    actual = model.logits(model(ids, torch.arange(60), full_causal()))
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() < 4e-5


def test_parameter_names_equal_transformers():
    for kind in KINDS:
        names = {name for name, _ in AutoModelForCausalLM.from_config(KINDS[kind]).named_parameters()}
        assert {name for name, _ in Decoder(ModelConfig.from_hf(KINDS[kind].to_dict())).named_parameters()} == names


@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_every_backend_gives_the_same_logits(backend):
    _, model = pair("llama")
    ids, positions = torch.arange(50), torch.arange(50)
    expected = model(ids, positions, full_causal())
    assert (model(ids, positions, full_causal(backend)) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_joined_weights_change_nothing_but_the_products(kind):
    _, model = pair(kind)
    ids, positions = torch.arange(20), torch.arange(20)
    expected, before = model(ids, positions, full_causal()), {n: p.clone() for n, p in model.state_dict().items()}
    assert model.join_weights() is model
    with profile_products() as products:
        joined = model(ids, positions, full_causal())
    assert products() == 3 * 5  # qkv, o, gate, up, down
    assert (joined - expected).abs().max() < 2e-5
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    q, k = model.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    model.join_weights()
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == q.data_ptr()  # nothing to be done


def test_a_change_after_joining_is_seen():
    """In place, a new parameter, another dtype and back, a copy of the model: never the weights of before."""
    ids, positions = torch.arange(20), torch.arange(20)

    def scale(model):
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.mul_(2)
        return model

    def assign(model):
        layer = model.model.layers[1].self_attn.k_proj
        layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
        return model

    def load(model):
        name = "model.layers.1.self_attn.k_proj.weight"
        weights = {n: p * 2 if n == name else p for n, p in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        return model

    plain = scale(pair("qwen2")[1])(ids, positions, full_causal())
    changes = (scale, assign, load, lambda m: scale(m.double().float()), lambda m: scale(copy.deepcopy(m)))
    for change in changes:
        model = change(pair("qwen2")[1].join_weights())
        assert (model(ids, positions, full_causal()) - plain).abs().max() < 2e-5


def test_joined_weights_learn():
    _, model = pair("qwen2")
    model.join_weights().requires_grad_(True)
    model(torch.arange(9), torch.arange(9), full_causal()).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lm_head" not in n)


@contextmanager
def profile_products():
    """Count matrix products: aten::mm without bias, aten::addmm with one."""
    with torch.profiler.profile() as profiler:
        yield lambda: sum(e.count for e in profiler.key_averages() if e.key in ("aten::mm", "aten::addmm"))


def test_positions_are_the_callers():
    """Rotary embedding encodes differences of positions: a shift of all of them changes nothing."""
    _, model = pair("llama")
    ids = torch.arange(20)
    here, there = model(ids, torch.arange(20), full_causal()), model(ids, torch.arange(40, 60), full_causal())
    assert (here - there).abs().max() < 1e-4
    assert (here - model(ids, torch.arange(20).flip(0), full_causal())).abs().max() > 0.1


def test_new_decoder_has_shapes_but_no_memory():
    model = Decoder(ModelConfig.from_hf(LlamaConfig().to_dict()))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.num_parameters() == 6738415616  # Llama-2-7B


def test_an_attend_without_windows_fails_on_a_model_that_slides():
    _, model = pair("mistral, window")
    with pytest.raises(TypeError, match="window"):
        model(torch.arange(9), torch.arange(9), lambda layer, q, k, v: q)


def test_the_chosen_backend_computes_the_window_too():
    _, model = pair("mistral, window")
    ids, positions = torch.arange(50), torch.arange(50)
    with counters.count() as tally:
        actual = model(ids, positions, full_causal("naive"))
    assert (actual - model(ids, positions, full_causal("sdpa"))).abs().max() < 2e-5
    assert tally.flops == 3 * 2 * 2 * 6 * 50 * 50 * 8  # 3 layers, 2 products, 6 heads of 8


@pytest.mark.parametrize("backend", ["naive", "tiled", "memory_efficient"])
def test_backends_slide_alike(backend):
    _, model = pair("mistral, window")  # of 7 tokens
    tokens = torch.arange(20)
    out = model(tokens, tokens, full_causal(backend))
    assert (out - model(tokens, tokens, full_causal("sdpa"))).abs().max() < 2e-5
    # Three layers pass a token on by 6 positions each: the last of 20 tokens cannot know the first one.
    other = model(tokens.index_fill(0, torch.tensor([0]), 50), tokens, full_causal(backend))
    moved = (out - other).abs().amax(dim=-1) > 0
    assert moved[:19].all()
    assert not moved[19]


def test_rms_norm_takes_its_mean_in_float32():
    norm = RMSNorm(4096, 1e-6)
    norm.load_state_dict({"weight": torch.ones(4096, dtype=torch.bfloat16)}, assign=True)
    x = torch.full((4096,), 300.0, dtype=torch.bfloat16)
    assert torch.equal(norm(x), torch.ones(4096, dtype=torch.bfloat16))
    # In float16 the square alone overflows.
    norm.load_state_dict({"weight": torch.ones(4096, dtype=torch.float16)}, assign=True)
    assert torch.equal(norm(x.half()), torch.ones(4096, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reference", [LlamaRMSNorm, Qwen3RMSNorm])
def test_rms_norm_rounds_where_transformers_rounds(reference, dtype):
    """The normalised vector is rounded to the dtype first, then multiplied by the weight.

    Bit for bit, but where the last digit of the float32 sum, which is added up in another order, decides the rounding.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) * 3).to(dtype)
    weight = torch.nn.Parameter((torch.rand(256, generator=generator) + 0.5).to(dtype), requires_grad=False)
    ours, theirs = RMSNorm(256, 1e-5), reference(256, 1e-5)
    ours.weight = theirs.weight = weight
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found.float(), expected.float(), rtol=max(3e-7, torch.finfo(dtype).eps), atol=0)
    if dtype != torch.float32:
        assert (found != expected).float().mean() < 1e-3


def test_rms_norm_with_an_update():
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, 1e-5)
    norm.load_state_dict({"weight": torch.rand(64, generator=generator)}, assign=True)
    x, update = torch.randn(2, 5, 64, generator=generator)
    normalised, total = norm(x, update)
    assert torch.equal(total, x + update)
    assert torch.equal(normalised, norm(x + update))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rope_angles_are_computed_in_float32(dtype):
    """Far positions too: bfloat16 has 8 bits, so as a position 4099 would be 4096 and its angle 3 radians off."""
    config = ModelConfig.from_hf(LlamaConfig(**SIZES, head_dim=64, rope_theta=1e4).to_dict())
    positions = torch.tensor([0, 1, 255, 4097, 4099, 6001, 8191])
    frequencies = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = positions.double()[:, None] * frequencies
    # Rounding cos and sin, which are at most 1, and the angle itself in float32.
    limit = torch.finfo(dtype).eps / 2 + 8191 * 2.0**-23
    for ours, exact in zip(RotaryEmbedding(config)(positions, dtype), (angles.cos(), angles.sin()), strict=True):
        assert ours.dtype == dtype
        assert (ours[:, 0].double() - exact).abs().max() <= limit


def test_init_random_is_repeatable():
    config = ModelConfig.from_hf(KINDS["qwen2"].to_dict())
    first, second = Decoder(config).init_random(3), Decoder(config).init_random(3)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.dtype == torch.float32
    assert first.device.type == "cpu"
