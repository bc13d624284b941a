"""GPTQ against the formula it is derived from: one column at a time, each with an inverse of its own, in float64."""

import numpy as np
import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization import gptq
from vllm_teach.quantization.gptq import invert_hessian, quantize_gptq
from vllm_teach.quantization.hessian import mean_square
from vllm_teach.quantization.rounding import quantize_rtn


def problem(out, inputs, tokens=400, seed=0):
    """(weight float64 [out, in], Hessian of correlated inputs of very different sizes)."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(tokens, 8) @ draw(8, inputs) + draw(tokens, inputs) * torch.rand(inputs, generator=generator)
    return draw(out, inputs) * 0.1, 2 * x.T @ x / tokens


def column_by_column(weight, hessian, bits, size, symmetric=False, damping=0.01, act_order=False):
    """Optimal brain quantisation in a fixed order (Frantar et al. 2022, equations 2 and 3), without any factor."""
    w, h = weight.numpy().copy(), hessian.numpy().copy()
    inputs = w.shape[1]
    h += damping * np.mean(np.diag(h)) * np.eye(inputs)
    order = np.argsort(-np.diag(hessian.numpy()), kind="stable") if act_order else np.arange(inputs)
    w, h = w[:, order], h[np.ix_(order, order)]
    codes, scales, zeros = np.zeros(w.shape), [], []
    for i in range(inputs):
        if i % size == 0:
            group = w[:, i : i + size]
            low, high = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
            if symmetric:
                high = np.maximum(-low, high)
                low = -high
            scale = ((high - low) / (2**bits - 1)).astype(np.float16)
            zero = np.full(len(w), 2 ** (bits - 1)) if symmetric else np.rint(-low / scale.astype(np.float64))
            scales.append(scale)
            zeros.append(zero)
        step = scales[-1].astype(np.float64)
        codes[:, i] = np.clip(np.rint(w[:, i] / step) + zeros[-1], 0, 2**bits - 1)
        error = w[:, i] - (codes[:, i] - zeros[-1]) * step
        inverse = np.linalg.inv(h[i:, i:])
        w[:, i:] -= np.outer(error / inverse[0, 0], inverse[0])
    back = np.argsort(order)
    return codes[:, back], np.stack(scales, 1), np.stack(zeros, 1)


@pytest.mark.parametrize(
    ("out", "inputs", "bits", "size", "options"),
    [
        (12, 32, 4, 8, {}),
        (12, 32, 3, None, {}),
        (5, 160, 4, 32, {}),
        (5, 160, 2, None, {}),  # more than one lazy block in a group
        (7, 96, 4, 96, {"symmetric": True}),
        (6, 48, 4, 16, {"act_order": True}),
        (6, 48, 8, 16, {"act_order": True, "symmetric": True, "damping": 0.1}),
    ],
)
def test_the_codes_are_those_of_the_formula(out, inputs, bits, size, options):
    weight, hessian = problem(out, inputs)
    quantized = quantize_gptq(weight, hessian, bits, group_size=size, **options)
    codes, scales, zeros = column_by_column(weight, hessian, bits, size or inputs, **options)
    np.testing.assert_array_equal(quantized.scales.numpy(), scales)
    np.testing.assert_array_equal(quantized.zeros.numpy(), zeros)
    np.testing.assert_array_equal(quantized.codes.numpy(), codes)


@pytest.mark.parametrize("columns", [1, 7, 1000])
def test_lazy_blocks_change_nothing(monkeypatch, columns):
    weight, hessian = problem(9, 96)
    expected = quantize_gptq(weight, hessian, 3, group_size=48)
    monkeypatch.setattr(gptq, "_LAZY_COLUMNS", columns)
    assert torch.equal(quantize_gptq(weight, hessian, 3, group_size=48).codes, expected.codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_outputs_err_less_than_after_rounding_to_nearest(bits, act_order):
    weight, hessian = problem(32, 64, seed=3)
    mended = quantize_gptq(weight.float(), hessian, bits, group_size=16, act_order=act_order)
    rounded = quantize_rtn(weight, bits, group_size=16)
    errors = [mean_square(each.dequantize(torch.float64) - weight, hessian) for each in (mended, rounded)]
    assert errors[0] < 0.7 * errors[1]


def test_float32_gives_nearly_the_codes_of_float64():
    weight, hessian = problem(64, 128, seed=4)
    wide, narrow = (quantize_gptq(each, hessian, group_size=32) for each in (weight, weight.float()))
    assert (wide.codes != narrow.codes).double().mean() < 0.01


def test_inputs_without_correlation_leave_nothing_to_mend():
    weight, _ = problem(8, 32)
    hessian = torch.diag(torch.arange(1.0, 33.0))
    quantized, rounded = quantize_gptq(weight, hessian, group_size=8), quantize_rtn(weight, group_size=8)
    assert torch.equal(quantized.codes, rounded.codes)
    assert torch.equal(quantized.scales, rounded.scales)


def test_act_order_rounds_the_largest_inputs_first_and_says_which_group_they_are_of():
    weight, hessian = problem(4, 24)
    quantized = quantize_gptq(weight, hessian, group_size=8, act_order=True)
    assert quantized.group_of.dtype == torch.int32
    assert quantized.group_of.bincount().tolist() == [8, 8, 8]
    largest = hessian.diagonal().argsort(descending=True)[:8]
    assert (quantized.group_of[largest] == 0).all()
    # Groups of wrong inputs would put weights on other inputs' grids.
    assert (quantized.dequantize() - weight).abs().max() < 4 * quantized.scales.float().max()


def test_a_dead_input_is_rounded_to_nearest_and_disturbs_no_other():
    weight, hessian = problem(6, 16)
    hessian[3], hessian[:, 3] = 0, 0
    quantized = quantize_gptq(weight, hessian, group_size=16, act_order=False)
    scale, zero = quantized.scales[:, 0].double(), quantized.zeros[:, 0].double()
    nearest = ((weight[:, 3] / scale).round() + zero).clamp(0, 15)
    assert torch.equal(quantized.codes[:, 3].double(), nearest)
    nothing = quantize_gptq(weight, torch.zeros(16, 16), group_size=8)
    assert torch.equal(nothing.codes, quantize_rtn(weight, group_size=8).codes)


def test_damping_rises_until_the_hessian_is_positive_definite_and_says_so():
    weight, _ = problem(4, 16)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # fewer tokens than inputs
    singular = 2 * x.T @ x / 5
    singular -= 1e-5 * singular.diagonal().mean() * torch.eye(16)
    factor = invert_hessian(singular, 0.0)
    assert 1e-5 < factor.damping <= 1e-3
    assert factor.upper.isfinite().all()
    with pytest.warns(UserWarning, match="not positive definite with damping=0: "):
        quantize_gptq(weight, singular, group_size=8, damping=0)
    assert invert_hessian(singular, 0.01).damping == 0.01


def test_the_factor_is_that_of_the_inverse():
    _, hessian = problem(1, 12)
    factor = invert_hessian(hessian, 0.0)
    torch.testing.assert_close(factor.upper.T @ factor.upper, torch.linalg.inv(hessian))
    assert torch.equal(factor.upper, factor.upper.triu())


@pytest.mark.parametrize(
    ("hessian", "arguments", "words"),
    [
        (torch.zeros(8), {}, r"hessian has dtype torch.float32 and shape \[8\]"),
        (torch.zeros(8, 7), {}, r"shape \[8, 7\]"),
        (torch.eye(9), {}, "hessian is for 9 inputs, and weight has 8"),
        (-torch.eye(8), {}, "negative diagonal"),
        (torch.full((8, 8), torch.nan), {}, "NaN or infinity"),
        (torch.eye(8), {"damping": -0.1}, "damping=-0.1 is not valid"),
        (torch.eye(8), {"group_size": 3}, "group_size=3 does not divide the 8 inputs"),
        (torch.eye(8), {"bits": 1}, "bits=1 is not valid"),
    ],
)
def test_what_cannot_work_is_refused(hessian, arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        quantize_gptq(torch.zeros(4, 8), hessian, **{"group_size": 8, **arguments})


def test_the_arguments_are_left_as_they_are():
    weight, hessian = problem(4, 16)
    hessian[2], hessian[:, 2] = 0, 0
    before = weight.clone(), hessian.clone()
    quantize_gptq(weight, hessian, group_size=8, act_order=True)
    quantize_gptq(weight, hessian, group_size=8)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


@pytest.mark.parametrize("act_order", [False, True])
def test_no_zero_of_0_where_a_format_has_none(act_order):
    """Of weights that are all positive, and so have a zero of 0 otherwise."""
    weight, hessian = problem(8, 32)
    plain, raised = (
        quantize_gptq(weight.abs(), hessian, 3, group_size=8, act_order=act_order, min_zero=least) for least in (0, 1)
    )
    assert (plain.zeros == 0).any()
    assert (raised.zeros >= 1).all()
    rounded = quantize_rtn(weight.abs(), 3, group_size=8, min_zero=1)
    errors = [mean_square(each.dequantize(torch.float64) - weight.abs(), hessian) for each in (raised, rounded)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("hessian", "damping"),
    [
        (torch.eye(8) + 1e308 * (1 - torch.eye(8, dtype=torch.float64)), 0.01),
        (torch.full((8, 8), 1e308, dtype=torch.float64), 0.01),  # whose mean overflows
        (torch.eye(8, dtype=torch.float64) * 1e300, 0.01),  # whose inverse is 0 in float32
        (torch.eye(8, dtype=torch.float64), 1e308),
    ],
)
def test_a_hessian_that_no_damping_mends_is_refused(hessian, damping):
    with pytest.raises(InvalidArgumentError, match="no damping makes it invertible"):
        invert_hessian(hessian * torch.ones(()), damping)


@pytest.mark.parametrize(("damping", "hessian"), [(10**400, torch.eye(8)), (0.01, torch.zeros(0, 0))])
def test_a_damping_beyond_floats_and_a_hessian_of_nothing_are_refused(damping, hessian):
    with pytest.raises(InvalidArgumentError, match=r"damping=1000|hessian has dtype"):
        invert_hessian(hessian, damping)
