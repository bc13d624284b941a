"""Quantised layers compute what plain layers with the dequantised weights compute; joining changes no bit."""

import copy

import pytest
import torch
from torch import nn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.linear import QuantizedEmbedding, QuantizedLinear, gated, join, together
from vllm_teach.quantization.quantized_weight import QuantizedWeight


def make_weight(out=48, size=64, groups=4, bits=4, seed=0, group_of=None):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, size), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(out, groups, generator=generator) * 0.1 + 0.01).half()
    zeros = torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8, generator=generator)
    return QuantizedWeight(codes, scales, zeros, bits, group_of)


def make_bias(out=48, seed=9):
    return nn.Parameter(torch.randn(out, generator=torch.Generator().manual_seed(seed)), requires_grad=False)


def inputs(tokens=5, size=64):
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(3))


SCATTERED = torch.randperm(64, generator=torch.Generator().manual_seed(0)).remainder(4).int()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_of", [None, SCATTERED], ids=["runs", "scattered"])
@pytest.mark.parametrize("bias", [None, make_bias()], ids=["plain", "bias"])
def test_a_linear_layer(bits, group_of, bias):
    weight, x = make_weight(bits=bits, group_of=group_of), inputs()
    layer = QuantizedLinear(weight, bias)
    exact = x.double() @ weight.dequantize(torch.float64).T + (0 if bias is None else bias.double())
    assert exact.std() > 0.1
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=1e-4)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    unpacked = layer.quantized_weight()
    assert (unpacked.bits, layer.num_weights) == (bits, 48 * 64)
    for name in ("codes", "scales", "zeros", "group_of"):
        found, given = getattr(unpacked, name), getattr(weight, name)
        assert found is given is None or torch.equal(found, given), name


def test_rounding_of_low_precision_is_that_of_a_plain_layer():
    """FlashAttention's rule: at most twice the error of the plain product with the rounded weight."""
    weight = make_weight(size=512)
    for dtype in (torch.bfloat16, torch.float16):
        x = inputs(33, 512).to(dtype)
        exact = x.double() @ weight.dequantize(torch.float64).T
        error, plain = (
            (out.double() - exact).abs().max() for out in (QuantizedLinear(weight)(x), x @ weight.dequantize(dtype).T)
        )
        assert error <= 2 * plain + 1e-5


def test_an_embedding_looks_up_and_multiplies():
    weight = make_weight(out=100, groups=1, bits=8)
    ids = torch.tensor([0, 99, 7, 7])
    for dtype in (torch.float32, torch.bfloat16):
        layer = QuantizedEmbedding(weight, dtype)
        assert torch.equal(layer(ids), weight.dequantize(dtype)[ids])
    exact = inputs().double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(layer.logits(inputs()).double(), exact, rtol=0, atol=2e-3)
    assert layer.num_weights == 6400


def layers_of(*outs, bias=False, **how):
    return [
        QuantizedLinear(make_weight(out, seed=seed, **how), make_bias(out, seed=seed + 10) if bias else None)
        for seed, out in enumerate(outs)
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_of", [None, SCATTERED], ids=["runs", "scattered"])
def test_joined_layers_are_what_they_were(bias, group_of):
    layers, x = layers_of(48, 16, 20, bias=bias, group_of=group_of), inputs()
    apart = [layer(x) for layer in layers]
    weights = [layer.quantized_weight() for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(together(x, *layers), apart, strict=True))
    assert join(*layers)
    assert len({id(layer.packed) for layer in layers}) == 1
    for found in (together(x, *layers), [layer(x) for layer in layers]):
        assert all(torch.equal(a, b) for a, b in zip(found, apart, strict=True))
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer.quantized_weight().dequantize(), weight.dequantize())
    packed = layers[0].packed
    assert join(*layers)
    assert layers[0].packed is packed  # nothing to be done
    first, *others = layers
    found = together(x, *others, first)  # not the order in which they were joined
    assert all(torch.equal(a, b) for a, b in zip(found, [*apart[1:], apart[0]], strict=True))


def test_layers_that_differ_stay_apart():
    x = inputs()
    for pair in (
        layers_of(16) + layers_of(32, bits=8),
        layers_of(16) + layers_of(32, groups=2),
        layers_of(16) + layers_of(32, bias=True),
        layers_of(16) + layers_of(32, group_of=SCATTERED),
        layers_of(16, group_of=SCATTERED) + layers_of(32, group_of=SCATTERED.flip(0)),
    ):
        assert not join(*pair)
        found = together(x, *pair)
        assert all(torch.equal(a, layer(x)) for a, layer in zip(found, pair, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up(bias):
    gate, up = layers_of(32, 32, bias=bias)
    x = inputs()
    dense = [
        x.double() @ layer.quantized_weight().dequantize(torch.float64).T + (layer.bias.double() if bias else 0)
        for layer in (gate, up)
    ]
    exact = torch.nn.functional.silu(dense[0]) * dense[1]
    torch.testing.assert_close(gated(x, gate, up).double(), exact, rtol=1e-5, atol=1e-4)
    assert join(gate, up)
    torch.testing.assert_close(gated(x, gate, up).double(), exact, rtol=1e-5, atol=1e-4)


def test_a_copy_is_another_layer():
    layers = layers_of(16, 32)
    join(*layers)
    copied = copy.deepcopy(layers)
    assert all(torch.equal(a, b) for a, b in zip(together(inputs(), *copied), together(inputs(), *layers), strict=True))
    assert copied[0].packed is copied[1].packed is not layers[0].packed


def test_gradients_and_other_devices_are_refused():
    layers = layers_of(16, 16)
    for joined in (False, True):
        if joined:
            join(*layers)
        for call in (lambda x: layers[0](x), lambda x: together(x, *layers), lambda x: gated(x, *layers)):
            with pytest.raises(InvalidArgumentError, match="x requires a gradient, which a quantised layer lacks"):
                call(inputs().requires_grad_(True))
            with pytest.raises(InvalidArgumentError, match=r"x is on meta, and a quantised layer stays .* on cpu"):
                call(inputs().to("meta"))
    with torch.no_grad():
        layers[0](inputs().requires_grad_(True))
