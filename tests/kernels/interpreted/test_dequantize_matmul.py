"""The product with packed weights against float64: any bits, group, shape and number of splits; packing is exact."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels import dequantize_matmul
from vllm_teach.kernels.triton_kernels.dequantize_matmul import (
    dequantize_matmul_spec,
    gated_matmul,
    matmul,
    pack,
    rows,
    unpack,
)
from vllm_teach.quantization import linear
from vllm_teach.quantization.quantized_weight import QuantizedWeight


def make_weight(out=70, size=96, groups=3, bits=4):
    codes = torch.randint(0, 2**bits, (out, size), dtype=torch.uint8)
    scales = (torch.rand(out, groups) * 0.1 + 0.01).half()
    zeros = torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8)
    return codes, scales, zeros


def dequantized(codes, scales, zeros, group):
    """Entry by entry, in float64."""
    weight = torch.empty(codes.shape, dtype=torch.float64)
    for i in range(codes.shape[1]):
        g = int(group[i])
        weight[:, i] = (codes[:, i].double() - zeros[:, g].double()) * scales[:, g].double()
    return weight


def assert_multiplies(x, weight, group, rule, bias=None, **how):
    exact_weight = dequantized(*weight[:3], group)
    out = matmul(x, pack(*weight), bias, **how)
    extra = 0 if bias is None else bias.double()
    plain = x @ exact_weight.to(x.dtype).T + (0 if bias is None else bias)
    rule(out, plain, x.double() @ exact_weight.T + extra)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 12])  # 96, 32 and 8 columns each: of whole tiles, and not
def test_bits_and_groups(bits, groups, assert_by_the_rule):
    weight = (*make_weight(groups=groups, bits=bits), bits)
    group = torch.arange(96) // (96 // groups)
    assert_multiplies(torch.randn(5, 96), weight, group, assert_by_the_rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 17, 130])
@pytest.mark.parametrize("splits", [None, 1, 2, 5])  # 5: more than there are chunks
def test_tokens_and_splits(tokens, splits, dtype, assert_by_the_rule):
    weight = (*make_weight(size=192), 4)
    x, bias = torch.randn(tokens, 192).to(dtype), torch.randn(70).to(dtype)
    assert_multiplies(x, weight, torch.arange(192) // 64, assert_by_the_rule, bias, splits=splits)


@pytest.mark.parametrize("size", [8, 40, 64, 200])
def test_sizes_that_fill_no_chunk(size, assert_by_the_rule):
    for bits in (2, 4, 8):
        weight = (*make_weight(out=3, size=size, groups=1, bits=bits), bits)
        assert_multiplies(torch.randn(2, size), weight, torch.zeros(size), assert_by_the_rule)


@pytest.mark.parametrize(("groups", "size"), [(3, 32), (7, 15), (1, 96)])  # of 15, the last has 6
def test_scattered_groups(groups, size, assert_by_the_rule):
    """GPTQ's act-order: group_of says where each column belongs."""
    group_of = (torch.randperm(96) // size).int()
    weight = (*make_weight(groups=groups), 4, group_of)
    assert_multiplies(torch.randn(5, 96), weight, group_of, assert_by_the_rule)
    packed = pack(*weight)
    assert_unpacks(packed, weight)
    ids = torch.tensor([7, 69, 7])
    torch.testing.assert_close(rows(packed, ids).double(), dequantized(*weight[:3], group_of)[ids], rtol=1e-6, atol=0)


def assert_unpacks(packed, weight):
    codes, scales, zeros, bits, group_of = unpack(packed)
    assert bits == weight[3]
    for found, given in zip((codes, scales, zeros, group_of), (*weight[:3], *weight[4:]), strict=False):
        assert torch.equal(found, given)
        assert found.dtype == given.dtype


def test_a_strided_input_and_the_output_s_dtype(assert_by_the_rule):
    weight, x = (*make_weight(), 4), torch.randn(96, 5).half().T
    out = matmul(x, pack(*weight), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, dequantize_matmul_spec(x.contiguous(), *weight[:3]).float(), rtol=0, atol=0.02)
    assert torch.equal(matmul(x, pack(*weight)), matmul(x.contiguous(), pack(*weight)))


def test_a_negation_that_is_put_off_counts():
    packed, x, bias = pack(*make_weight(), 4), torch.randn(2, 96), torch.randn(70)
    assert torch.equal(matmul(torch._neg_view(x), packed, torch._neg_view(bias)), matmul(-x, packed, -bias))


def test_no_tokens():
    assert matmul(torch.empty(0, 96), pack(*make_weight(), 4)).shape == (0, 70)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [8, 96, 200])
def test_packing_is_exact_and_small(bits, size):
    weight = make_weight(size=size, groups=size // 8, bits=bits)
    packed = pack(*weight, bits)
    assert_unpacks(packed, (*weight, bits))
    assert unpack(packed)[4] is None
    ids = torch.tensor([0, 69, 5, 5])
    expected = dequantized(*weight, torch.arange(size) // 8)[ids]
    torch.testing.assert_close(rows(packed, ids).double(), expected, rtol=1e-6, atol=0)
    stored = {2: 2, 3: 4, 4: 4, 8: 8}[bits]
    chunk = 32 * 8 // stored
    assert packed.codes.nbytes == 70 * -(-size // chunk) * 32
    assert packed.num_bytes == packed.codes.nbytes + 70 * (size // 8) * 3


def test_the_kernel_is_its_specification():
    weight, x = make_weight(), torch.randn(4, 96)
    torch.testing.assert_close(matmul(x, pack(*weight, 4)), dequantize_matmul_spec(x, *weight), rtol=0, atol=1e-5)


def test_wrong_arguments_are_refused():
    packed = pack(*make_weight(), 4)
    with pytest.raises(InvalidArgumentError, match=r"x has shape \[2, 95\]; it must be \[tokens, 96\]"):
        matmul(torch.randn(2, 95), packed)
    with pytest.raises(InvalidArgumentError, match=r"x has dtype torch\.float64; the kernel takes"):
        matmul(torch.randn(2, 96).double(), packed)
    with pytest.raises(InvalidArgumentError, match=r"x has dtype torch\.bfloat16, which Triton's interpreter"):
        matmul(torch.randn(2, 96).bfloat16(), packed)
    with pytest.raises(InvalidArgumentError, match=r"bias has shape \[69\] on cpu; it must be \[70\] on cpu"):
        matmul(torch.randn(2, 96), packed, torch.zeros(69))
    for splits in (0, -1):
        with pytest.raises(InvalidArgumentError, match=f"splits is {splits}; give a whole number from 1"):
            matmul(torch.randn(2, 96), packed, splits=splits)
    with pytest.raises(InvalidArgumentError, match="packed has 69 rows: gate and up must have half of them each"):
        gated_matmul(torch.randn(2, 96), pack(*make_weight(out=69), 4))
    with pytest.raises(InvalidArgumentError, match="group_of has groups of 1 to 94 inputs"):
        pack(*make_weight(), 4, torch.tensor([0, 1] + [2] * 94, dtype=torch.int32))


def test_a_model_s_layers_run_on_the_kernel(monkeypatch):
    """As they do on a GPU: linear layers apart, joined and gated, and an embedding."""
    monkeypatch.setattr(linear, "kernel_for", lambda device_type: dequantize_matmul)
    weights = [QuantizedWeight(*make_weight(out=out), 4) for out in (32, 32)]
    x, bias = torch.randn(5, 96), torch.nn.Parameter(torch.randn(32), requires_grad=False)
    dense = [x @ weight.dequantize().T + bias for weight in weights]
    layers = [linear.QuantizedLinear(weight, bias) for weight in weights]
    for joined in (False, True):
        assert not joined or linear.join(*layers)
        for found in (linear.together(x, *layers), [layer(x) for layer in layers]):
            torch.testing.assert_close(list(found), dense, rtol=0, atol=1e-4)
        gate, up = dense
        torch.testing.assert_close(linear.gated(x, *layers), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-4)
    embedding, ids = linear.QuantizedEmbedding(weights[0], torch.float16), torch.tensor([31, 0, 31])
    assert torch.equal(embedding(ids), weights[0].dequantize(torch.float16)[ids])
    torch.testing.assert_close(embedding.logits(x), dense[0] - bias, rtol=0, atol=1e-4)
