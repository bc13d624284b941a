"""Rounding to nearest against a search over all grid points, and its grids against plain arithmetic in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.rounding import check_group_size, choose_grid, quantize_rtn

BITS = (2, 3, 4, 8)


def random_weight(out=6, inputs=32, seed=0):
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1


def points(quantized):
    """Every number that each weight could have become, float64 [out, in, 2^bits]."""
    codes = torch.arange(2**quantized.bits, dtype=torch.float64)
    scales, zeros = (each.double()[:, quantized.groups(), None] for each in (quantized.scales, quantized.zeros))
    return (codes - zeros) * scales


def grid_by_hand(values, bits, symmetric):
    """(scale as float16, zero) of one group of numbers."""
    low, high = min(0.0, values.min()), max(0.0, values.max())
    if symmetric:
        low, high = -max(-low, high), max(-low, high)
    if low == high:
        return np.float16(1), 2 ** (bits - 1) if symmetric else 0
    scale = np.float16(np.float32(high - low) / np.float32(2**bits - 1))
    return scale, 2 ** (bits - 1) if symmetric else round(-low / float(scale))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("granularity", ["group", "channel", "tensor"])
def test_every_weight_becomes_the_nearest_point_of_its_grid(granularity, bits, symmetric):
    weight = random_weight()
    quantized = quantize_rtn(weight, bits, granularity=granularity, group_size=8, symmetric=symmetric)
    nearest = (points(quantized) - weight.double()[..., None]).abs().amin(-1)
    taken = (quantized.dequantize(torch.float64) - weight.double()).abs()
    torch.testing.assert_close(taken, nearest, rtol=0, atol=1e-7)  # dequantised in float32
    assert quantized.codes.int().max() < 2**bits
    assert quantized.num_groups == {"group": 4, "channel": 1, "tensor": 1}[granularity]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("granularity", "size"), [("group", 8), ("channel", 32), ("tensor", 32)])
def test_grids_reach_from_the_smallest_to_the_largest_weight(granularity, size, bits, symmetric):
    weight = random_weight(seed=1)
    weight[2, 8:16] = weight[2, 8:16].abs()  # all on one side
    weight[3, 8:16] = -weight[3, 8:16].abs()
    quantized = quantize_rtn(weight, bits, granularity=granularity, group_size=8, symmetric=symmetric)
    for row in range(len(weight)):
        for group in range(quantized.num_groups):
            own = weight[row, group * size : (group + 1) * size].numpy()
            scale, zero = grid_by_hand(weight.numpy() if granularity == "tensor" else own, bits, symmetric)
            assert quantized.scales[row, group].item() == scale
            assert quantized.zeros[row, group].item() == zero


@pytest.mark.parametrize("bits", BITS)
def test_a_grid_without_a_zero_of_0_still_reaches_the_largest_weight(bits):
    weight = random_weight(seed=1)
    weight[:, :8] = weight[:, :8].abs()  # a grid with a zero of 0
    weight[0, 8:16] = 0
    plain, raised = (quantize_rtn(weight, bits, group_size=8, min_zero=least) for least in (0, 1))
    assert (plain.zeros[:, 0] == 0).all()
    assert raised.zeros.min() == 1
    steps = weight[:, :8].amax(1).double() / (2**bits - 2)  # one code is below 0
    torch.testing.assert_close(raised.scales[:, 0].double(), steps, rtol=2**-10, atol=0)
    assert (raised.codes[:, :8].amax(1) == 2**bits - 1).all()
    nearest = (points(raised) - weight.double()[..., None]).abs().amin(-1)
    torch.testing.assert_close((raised.dequantize(torch.float64) - weight.double()).abs(), nearest, rtol=0, atol=1e-7)
    assert (raised.dequantize()[0, 8:16] == 0).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(BITS), st.booleans(), st.floats(1e-4, 1e3))
@settings(max_examples=60, deadline=None)
def test_no_weight_moves_by_more_than_its_step(seed, bits, symmetric, size):
    """Half a step by rounding, and half a step more where a rounded zero shifts the grid past an end."""
    weight = random_weight(seed=seed) * size
    quantized = quantize_rtn(weight, bits, group_size=16, symmetric=symmetric)
    off = (quantized.dequantize() - weight).abs().unflatten(1, (2, 16)).amax(-1)
    # A scale rounded down by float16 leaves the grid short by up to 2^-11 of it per code.
    assert (off <= quantized.scales.float() * (1 + 2**bits * 2.0**-11)).all()


def test_zeros_and_constants():
    weight = torch.tensor([[0.0] * 8, [0.25] * 8, [-0.5] * 8])
    for symmetric in (False, True):
        quantized = quantize_rtn(weight, 8, granularity="channel", symmetric=symmetric)
        there = quantized.dequantize()
        assert (there[0] == 0).all(), "zero is a point of every grid"
        torch.testing.assert_close(there[1:], weight[1:], rtol=0.01, atol=0)


def test_a_float64_weight_and_a_bfloat16_one_are_taken_as_they_are():
    weight = random_weight().to(torch.bfloat16)
    as_is, wide = quantize_rtn(weight, group_size=8), quantize_rtn(weight.double(), group_size=8)
    assert torch.equal(as_is.codes, wide.codes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"group_size": 128}, r"group_size=128 does not divide the 576 inputs of weight: use one of 8, 16, .*, 64, "),
        ({"group_size": 0}, "group_size=0 does not divide"),
        ({"group_size": True}, "group_size=True does not divide"),
        ({"bits": 5}, "bits=5 is not valid: use one of 2, 3, 4, 8"),
        ({"bits": 4.0}, "bits=4.0 is not valid"),
        ({"min_zero": 2}, "min_zero=2 is not valid: use 0, or 1"),
        ({"granularity": "row"}, "granularity='row' is not valid: use one of 'group', 'channel', 'tensor'"),
    ],
)
def test_what_cannot_work_is_refused(arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        quantize_rtn(torch.zeros(2, 576), **arguments)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(0, 8), r"shape \[0, 8\]"),
        (torch.zeros(2, 8, dtype=torch.int64), "dtype torch.int64"),
        (torch.full((2, 8), torch.nan), "weight holds NaN or infinity"),
        (torch.full((2, 8), 1e9), "float16 ends at 65504"),
    ],
)
def test_weights_that_are_none_are_refused(weight, words):
    with pytest.raises(InvalidArgumentError, match=words):
        quantize_rtn(weight, granularity="channel")


def test_no_group_size_means_the_whole_row():
    assert check_group_size(576, None) == 576
    assert quantize_rtn(random_weight(), group_size=None).num_groups == 1
    with pytest.raises(InvalidArgumentError, match=r"7 inputs of model\.x: use one of 7"):
        check_group_size(7, 2, "model.x")


def test_a_range_or_a_weight_without_numbers_is_refused():
    nothing = torch.full((2, 2), torch.nan)
    with pytest.raises(InvalidArgumentError, match="needs a scale of nan"):
        choose_grid(nothing, nothing, 4, symmetric=False)
    with pytest.raises(InvalidArgumentError, match="on meta: give floating-point numbers"):
        quantize_rtn(torch.ones(4, 64, device="meta"))
