import math

import pytest
import torch

from vllm_teach.attention.flash_module import FlashAttention
from vllm_teach.attention.reference import naive_attention
from vllm_teach.errors import InvalidArgumentError


def test_the_articles_call():
    q, k, v = (torch.randn(1, 40, 16, 128) for _ in range(3))
    out = FlashAttention(head_size=128, scale=1 / math.sqrt(128), num_heads=16)(q, k, v)
    exact = naive_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_hidden_states_go_in_and_come_out_as_a_projection_leaves_them(make_qkv):
    q, k, v = make_qkv(q_len=5, kv_len=9, q_heads=4, kv_heads=2)
    layer = FlashAttention(8, num_heads=4, num_kv_heads=2, causal=True, window_size=(3, 0), softcap=2.0)
    expected = naive_attention(q, k, v, causal=True, window_size=(3, 0), softcap=2.0)
    torch.testing.assert_close(layer(q, k, v), expected, rtol=0, atol=1e-12)
    flat = layer(q.flatten(2), k.flatten(2), v.flatten(2))
    torch.testing.assert_close(flat, expected.flatten(2), rtol=0, atol=1e-12)
    assert torch.equal(layer(q.flatten(2), k, v), flat)  # each tensor may come either way; out comes as q did


def test_without_num_heads_the_tensors_say_how_many(make_qkv):
    q, k, v = make_qkv(q_heads=6, kv_heads=3)
    torch.testing.assert_close(FlashAttention(8, 0.5)(q, k, v), naive_attention(q, k, v, scale=0.5), rtol=0, atol=1e-12)
    with pytest.raises(InvalidArgumentError, match=r"q has shape \[2, 7, 48\]"):
        FlashAttention(8)(q.flatten(2), k, v)


def test_dropout_happens_in_training_mode_only(make_qkv):
    q, k, v = make_qkv(q_len=20, kv_len=20)
    layer = FlashAttention(8, num_heads=2, dropout_p=0.5)
    assert layer.training
    state = torch.get_rng_state()
    seed = int(torch.randint(0, 2**62, ()).item())
    torch.set_rng_state(state)
    first = layer(q, k, v)
    torch.testing.assert_close(first, naive_attention(q, k, v, dropout_p=0.5, dropout_seed=seed), rtol=0, atol=1e-12)
    assert not torch.equal(first, layer(q, k, v))
    layer.eval()
    torch.testing.assert_close(layer(q, k, v), naive_attention(q, k, v), rtol=0, atol=1e-12)


def test_gradients_reach_what_comes_before(make_qkv):
    q, k, v = (t.requires_grad_() for t in make_qkv())
    found = torch.autograd.grad(FlashAttention(8, num_heads=2, causal=True)(q, k, v).square().sum(), (q, k, v))
    expected = torch.autograd.grad(naive_attention(q, k, v, causal=True).square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_it_is_a_layer_without_weights_that_shows_its_sizes():
    layer = FlashAttention(128, num_heads=16, num_kv_heads=4, causal=True)
    assert list(layer.parameters()) == []
    assert layer.state_dict() == {}
    assert repr(layer) == "FlashAttention(head_size=128, scale=0.0883883, num_heads=16, num_kv_heads=4, causal=True)"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (2, 7, 2, 16), ["q has shape [2, 7, 2, 16]", "[batch, length, 2, 8]", "[batch, length, 16]"]),
        ("q", (2, 7, 4, 8), ["q has shape [2, 7, 4, 8]"]),
        ("k", (2, 7, 1, 8), ["k has shape [2, 7, 1, 8]"]),
        ("v", (2, 7, 24), ["v has shape [2, 7, 24]"]),
        ("v", (7, 16), ["v has shape [7, 16]"]),
        ("k", (1, 7, 2, 8), ["batch sizes"]),
    ],
)
def test_tensors_that_disagree_with_the_layer_are_refused(name, shape, words):
    tensors = {each: torch.randn(2, 7, 2, 8) for each in "qkv"} | {name: torch.randn(shape)}
    if words == ["batch sizes"]:
        tensors["v"] = tensors["k"]
    with pytest.raises(InvalidArgumentError) as raised:
        FlashAttention(8, num_heads=2)(**tensors)
    assert all(word in str(raised.value) for word in words), raised.value
    with pytest.raises(InvalidArgumentError, match=f"{name} is of type list"):
        FlashAttention(8, num_heads=2)(**(tensors | {each: torch.randn(2, 7, 2, 8) for each in "qkv"} | {name: [1.0]}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"head_size": 0}, "head_size is 0"),
        ({"head_size": 8, "scale": math.nan}, "scale is nan"),
        ({"head_size": 8, "num_heads": 0}, "num_heads is 0"),
        ({"head_size": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3 and num_heads 4"),
        ({"head_size": 8, "num_kv_heads": 3}, "num_kv_heads is 3 and num_heads None"),
        ({"head_size": 8, "dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"head_size": 8, "softcap": "x"}, "softcap"),
        ({"head_size": 8, "softcap": -2.0}, "softcap is -2.0"),
        ({"head_size": 8, "causal": 1}, "causal is 1"),
        ({"head_size": 8, "window_size": (1, 2, 3)}, "window_size"),
    ],
)
def test_a_layer_that_cannot_work_is_refused(arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        FlashAttention(**arguments)
