"""The norm kernels against float64, in Triton's interpreter: any size, rows that are hard to sum up, strides, sums."""

import pytest
import torch
import torch.nn.functional as F

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels import layer_norm as layer
from vllm_teach.kernels.triton_kernels import rms_norm as rms
from vllm_teach.kernels.triton_kernels.norm_rows import LARGEST_SIZE, warps

EPS = 1e-5
DTYPES = (torch.float32, torch.float16)
SIZES = (1, 2, 17, 64, 576, 1000, 2048, 8192)


def exact_layer_norm(x, weight, bias):
    return F.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), EPS)


def exact_rms_norm(x, weight):
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


def parameters(size, dtype):
    return (torch.randn(size) + 1).to(dtype), torch.randn(size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_any_size(size, dtype, assert_by_the_rule):
    x = (3 * torch.randn(4, size) + 1).to(dtype)
    weight, bias = parameters(size, dtype)
    plain = F.layer_norm(x, (size,), weight, bias, EPS)
    assert_by_the_rule(layer.layer_norm(x, weight, bias, EPS), plain, exact_layer_norm(x, weight, bias))
    plain = F.rms_norm(x, (size,), weight, EPS)
    # transformers' rule rounds once more than PyTorch's.
    assert_by_the_rule(rms.rms_norm(x, weight, EPS), plain, exact_rms_norm(x, weight), factor=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 576])
def test_the_sum_before_it(size, dtype, assert_by_the_rule):
    x, residual = (torch.randn(2, 3, size).to(dtype) for _ in range(2))
    before = x.clone(), residual.clone()
    weight, bias = parameters(size, dtype)
    total = x + residual
    out, summed = layer.add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(summed, total)
    assert torch.equal(out, layer.layer_norm(total, weight, bias, EPS))
    out, summed = rms.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, total)
    assert torch.equal(out, rms.rms_norm(total, weight, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_weight_and_bias(dtype):
    x = torch.randn(3, 50).to(dtype)
    ones, zeros = torch.ones(50, dtype=dtype), torch.zeros(50, dtype=dtype)
    assert torch.equal(layer.layer_norm(x, eps=EPS), layer.layer_norm(x, ones, zeros, EPS))
    assert torch.equal(layer.layer_norm(x, ones, None, EPS), layer.layer_norm(x, ones, zeros, EPS))
    assert torch.equal(rms.rms_norm(x, eps=EPS), rms.rms_norm(x, ones, EPS))


def test_a_constant_row_is_the_bias_to_the_last_bit():
    x = torch.tensor([0.0, 0.1, -7.3, 1000.1, 1e-30, 1e30, -3e38])[:, None].expand(7, 300)
    weight, bias = parameters(300, torch.float32)
    assert torch.equal(layer.layer_norm(x, weight, bias, EPS), bias.expand(7, 300))


@pytest.mark.parametrize("size", [3, 1000])
@pytest.mark.parametrize("magnitude", [1e38, 1e30, 4e18, 1e15, 1e-20, 1e-38])
def test_huge_and_tiny_rows(magnitude, size):
    """A plain float32 formula squares 1e30 to infinity, and answers 0."""
    x = torch.rand(2, size) * magnitude
    close = {"rtol": 2e-5, "atol": 2e-5 * min(magnitude / EPS**0.5, 1.0)}
    weight = torch.randn(size)
    found = layer.layer_norm(x, weight, None, EPS)
    torch.testing.assert_close(found.double(), exact_layer_norm(x, weight, torch.zeros(size)), **close)
    torch.testing.assert_close(rms.rms_norm(x, weight, EPS).double(), exact_rms_norm(x, weight), **close)


def test_a_small_spread_around_a_large_mean():
    """In one pass, by the mean of x² less the square of the mean, float32 has no digit of this left."""
    x = 10_000 + torch.randn(4, 512) * 0.1
    out = layer.layer_norm(x, eps=EPS).double()
    torch.testing.assert_close(out, F.layer_norm(x.double(), (512,), eps=EPS), rtol=0, atol=1e-4)


def test_the_specifications_say_the_same():
    x = torch.randn(5, 96)
    weight, bias = parameters(96, torch.float32)
    close = {"rtol": 0, "atol": 5e-6}
    spec = layer.layer_norm_spec(x, weight, bias, EPS)
    torch.testing.assert_close(spec.double(), exact_layer_norm(x, weight, bias), **close)
    torch.testing.assert_close(rms.rms_norm_spec(x, weight, EPS).double(), exact_rms_norm(x, weight), **close)
    half, weight = x.half(), weight.half()
    found, normalised = rms.rms_norm(half, weight, EPS), exact_rms_norm(half, torch.ones(96))
    assert (found != rms.rms_norm_spec(half, weight, EPS)).sum() <= 2  # a sum in another order may tip a rounding
    assert (found != (normalised * weight).half()).sum() > 20  # which rounds once


def test_nan_and_infinity_stay_in_their_row():
    x = torch.randn(4, 40)
    x[0, 3], x[2, 39] = torch.nan, torch.inf
    for out in (layer.layer_norm(x), rms.rms_norm(x)):
        assert out[0].isnan().all()
        assert out[2].isnan().any()
        assert out[[1, 3]].isfinite().all()


def test_strided_rows_and_views():
    wide = torch.randn(6, 100)
    weight, bias = parameters(33, torch.float32)
    for x in (wide[:, 7:40], wide[::2, :33], wide.T[:33].T, wide[:, ::3][:, :33], torch.randn(33), wide[:0, :33]):
        found = layer.layer_norm(x, weight, bias, EPS)
        assert found.shape == x.shape
        assert torch.equal(found, layer.layer_norm(x.contiguous(), weight, bias, EPS))
        residual = torch.randn(x.shape)
        out, total = rms.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, rms.rms_norm(total, weight, EPS))


def test_a_negation_that_is_put_off_counts():
    x, weight, bias = torch.randn(2, 40), torch.randn(40), torch.randn(40)
    put_off = [torch._neg_view(each) for each in (x, weight, bias)]
    assert torch.equal(layer.layer_norm(*put_off), layer.layer_norm(-x, -weight, -bias))
    assert torch.equal(rms.rms_norm(*put_off[:2]), rms.rms_norm(-x, -weight))


def test_the_number_of_warps():
    assert [warps(tile) for tile in (1, 256, 1024, 8192, LARGEST_SIZE)] == [1, 1, 4, 32, 32]


X, W = torch.zeros(2, 8), torch.zeros(8)
CALLS = [
    (torch.tensor(1.0), None, None, None, r"x has shape \[\]; give \[..., size\] with a size from 1 to 65536"),
    (X[:, :0], None, None, None, r"x has shape \[2, 0\]"),
    (torch.zeros(1, LARGEST_SIZE + 1), None, None, None, r"x has shape \[1, 65537\]"),
    (X.double(), None, None, None, r"x has dtype torch.float64; the kernels take"),
    (X, W[:7], None, None, r"weight has shape \[7\] and x \[2, 8\]; give weight as \[8\]"),
    (X, W, W[None], None, r"bias has shape \[1, 8\] and x \[2, 8\]; give bias as \[8\]"),
    (X, W, W, X[:1], r"residual has shape \[1, 8\] and x \[2, 8\]"),
    (X, W.half(), None, None, r"weight is torch.float16 on cpu and x torch.float32 on cpu; make them equal"),
    (X, W, W, X.to("meta"), r"residual is torch.float32 on meta and x torch.float32 on cpu"),
    (X.to("meta"), None, None, None, r"x is on meta; move it to a CUDA device"),
    (X.bfloat16(), None, None, None, r"x has dtype torch.bfloat16, which Triton's interpreter rounds towards zero"),
]


@pytest.mark.parametrize(("x", "weight", "bias", "residual", "words"), CALLS, ids=[call[-1] for call in CALLS])
def test_what_is_refused(x, weight, bias, residual, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        layer.add_layer_norm(x, residual, weight, bias)  # without a residual, it is layer_norm
    assert str(caught.value).endswith(".")
