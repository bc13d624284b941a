"""AWQ's searches against the outputs themselves, computed token by token, and clipping against plain loops."""

from dataclasses import replace

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.awq import quantize_clipped, search_clip, search_scales
from vllm_teach.quantization.hessian import Hessian
from vllm_teach.quantization.rounding import quantize_rtn


def inputs_with_outliers(tokens=200, size=32, seed=0):
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 30
    x[:, 20] *= 12
    return x


def statistics(x):
    hessian = Hessian(x.shape[-1])
    hessian.add(x)
    return hessian


def random_weight(out=16, size=32, seed=1):
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed)) * 0.1


def nearest_codes(weight, grid):
    """The codes of the grid points nearest to `weight`, found by looking at all of them."""
    codes = torch.arange(2**grid.bits)
    scales, zeros = (each.double()[:, grid.groups(), None] for each in (grid.scales, grid.zeros))
    return ((codes - zeros) * scales - weight.double()[..., None]).abs().argmin(-1).to(torch.uint8)


def test_each_exponent_has_the_error_that_its_scales_make_in_the_outputs():
    x, weight = inputs_with_outliers(), random_weight()
    seen = statistics(x)
    search = search_scales(weight, seen.matrix, seen.magnitudes, 3, group_size=16, steps=5)
    for step, error in enumerate(search.errors):
        scales = x.abs().mean(0) ** (step / 5)
        scales /= (scales.max() * scales.min()).sqrt()
        rounded = quantize_rtn(weight * scales, 3, group_size=16).dequantize(torch.float64)
        outputs = (x.double() / scales.double()) @ rounded.T
        wanted = x.double() @ weight.double().T
        assert error == pytest.approx((outputs - wanted).square().sum(1).mean().item(), rel=1e-3)


def test_large_inputs_get_a_finer_grid_and_the_outputs_err_less():
    x, weight = inputs_with_outliers(), random_weight()
    seen = statistics(x)
    search = search_scales(weight, seen.matrix, seen.magnitudes, 3, group_size=16)
    assert search.alpha > 0
    assert min(search.errors) < 0.6 * search.errors[0]
    assert search.errors[round(search.alpha * 20)] == min(search.errors)
    assert search.scales.argmax() == 5
    assert (search.scales.max() * search.scales.min()).item() == pytest.approx(1, rel=1e-5)


def test_no_scale_where_none_helps():
    """At alpha 0 the search is rounding to nearest, so it never does worse than that."""
    weight = random_weight()
    seen = statistics(torch.eye(32))
    search = search_scales(weight, seen.matrix, seen.magnitudes, group_size=16)
    assert search.alpha == 0
    assert torch.equal(search.scales, torch.ones(32))


def test_inputs_of_one_source_share_a_scale():
    x, weight = inputs_with_outliers(), random_weight()
    seen = statistics(x)
    source = torch.arange(16).repeat(2)  # inputs 5 and 21, 20 and 4
    search = search_scales(weight, seen.matrix, seen.magnitudes, 3, group_size=16, source=source)
    assert search.alpha > 0
    assert torch.equal(search.scales[:16], search.scales[16:])
    both = x.abs().mean(0).view(2, 16).mean(0)
    expected = both**search.alpha
    torch.testing.assert_close(search.scales[:16], expected / (expected.max() * expected.min()).sqrt())


def test_an_input_that_is_always_zero_does_no_harm():
    x, weight = inputs_with_outliers(), random_weight()
    x[:, 9] = 0
    seen = statistics(x)
    scales = search_scales(weight, seen.matrix, seen.magnitudes, 3, group_size=16).scales
    assert scales.isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_takes_the_best_limit_of_each_group(symmetric):
    x, weight = inputs_with_outliers(), random_weight(out=5)
    weight[2, 3] = 2.0  # an outlier
    limit = search_clip(weight, statistics(x).matrix, 3, group_size=16, symmetric=symmetric)
    for row in range(5):
        for group in range(2):
            inputs = slice(16 * group, 16 * group + 16)
            w, seen = weight[row, inputs].double(), x[:, inputs].double()
            largest = w.abs().max()
            tried = []
            for percent in range(100, 45, -5):
                cut = w.clamp(-largest * percent / 100, largest * percent / 100).float()[None]
                grid = quantize_rtn(cut, 3, granularity="channel", symmetric=symmetric)
                rounded = replace(grid, codes=nearest_codes(w[None], grid)).dequantize(torch.float64)
                tried.append((seen @ (rounded[0] - w)).square().mean().item())
            percent = round(float(limit[row, group] / largest) * 100)
            assert tried[(100 - percent) // 5] == pytest.approx(min(tried), rel=1e-3)


def test_clipped_groups_keep_the_grid_of_clipped_weights_and_round_all_to_its_nearest_point():
    weight = random_weight()
    clipped = quantize_clipped(weight, torch.full((16, 2), 0.15), 4)
    grid = quantize_rtn(weight.clamp(-0.15, 0.15), 4, group_size=16)
    assert torch.equal(clipped.scales, grid.scales)
    assert torch.equal(clipped.zeros, grid.zeros)
    assert torch.equal(clipped.codes, nearest_codes(weight, grid))


def test_what_does_not_fit_is_refused():
    weight = random_weight()
    with pytest.raises(InvalidArgumentError, match=r"hessian has shape \[8, 8\]: for a weight of 32 inputs"):
        search_scales(weight, torch.eye(8), torch.ones(32), group_size=16)
    with pytest.raises(InvalidArgumentError, match=r"hessian has shape \[8, 8\]"):
        search_clip(weight, torch.eye(8), group_size=16)
    with pytest.raises(InvalidArgumentError, match=r"magnitudes has shape \[8\]"):
        search_scales(weight, torch.eye(32), torch.ones(8), group_size=16)
    with pytest.raises(InvalidArgumentError, match="group_size=5 does not divide the 32 inputs"):
        search_clip(weight, torch.eye(32), group_size=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hessian": torch.full((16, 16), torch.nan)}, "hessian holds NaN or infinity"),
        ({"hessian": torch.eye(16, dtype=torch.float64) * 1e300}, "hessian holds NaN or infinity"),  # in float32
        ({"magnitudes": torch.full((16,), torch.inf)}, "magnitudes holds NaN or infinity"),
        ({"steps": 0}, "steps=0 is not valid"),
        ({"source": torch.zeros(3, dtype=torch.int64)}, r"source has dtype torch\.int64 and shape \[3\]"),
        ({"source": torch.full((16,), -1)}, "source has dtype"),
    ],
)
def test_searches_of_scales_that_cannot_work_are_refused(changes, words):
    good = {"weight": torch.ones(4, 16), "hessian": torch.eye(16), "magnitudes": torch.ones(16), "group_size": 8}
    search_scales(**good)
    with pytest.raises(InvalidArgumentError, match=words):
        search_scales(**{**good, **changes})


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (torch.ones(3), r"limit has shape \[3\]"),
        (torch.ones(4, 3), r"limit has shape \[4, 3\]: for a weight \[4, 16\]"),
        (torch.full((4, 2), torch.nan), "needs a scale of nan"),
    ],
)
def test_limits_that_fit_no_weight_are_refused(limit, words):
    with pytest.raises(InvalidArgumentError, match=words):
        quantize_clipped(torch.ones(4, 16), limit)
