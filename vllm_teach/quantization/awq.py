"""AWQ (Lin et al. 2023, arXiv 2306.00978): weights whose inputs are large matter more, so give them a finer grid.

The weights of input i are multiplied by a scale s[i] before they are rounded, and the input is divided by it: the
product is the same, but relative to it the rounding error of that input shrinks (section 3.2). The division costs
nothing, because the operator that makes the inputs can do it in its own weights. A second search clips each group's
range: without its few outliers the grid is finer for all others.

Both searches minimise the mean squared error of the outputs on the calibration inputs, which the Hessian gives exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.hessian import mean_square
from vllm_teach.quantization.quantized_weight import QuantizedWeight
from vllm_teach.quantization.rounding import (
    check_bits,
    check_group_size,
    check_weight,
    quantize_in_range,
    quantize_rtn,
)

_ALPHAS = 20
# A range is cut to 100, 95, … 50 % of itself.
_CLIP_STEPS, _SMALLEST_CLIP = 10, 0.5
_SMALLEST_MAGNITUDE = 1e-4


class ScaleSearch(NamedTuple):
    """The best scales, float32 `[in]`, their exponent, and the output error of each exponent that was tried."""

    scales: Tensor
    alpha: float
    errors: list[float]


def search_scales(
    weight: Tensor,
    hessian: Tensor,
    magnitudes: Tensor,
    bits: int = 4,
    *,
    group_size: int | None = 64,
    symmetric: bool = False,
    source: Tensor | None = None,
    steps: int = _ALPHAS,
) -> ScaleSearch:
    """Return the scales s = magnitudes^alpha, of alpha = 0, 1/steps … 1 - 1/steps, that make rounding err least.

    `weight` `[out, in]` is of all layers that read these inputs, one below the other; `hessian` `[in, in]` and
    `magnitudes` `[in]` are a `Hessian`'s. Inputs with the same `source`, int64 `[in]`, get the same scale, by the mean
    of their magnitudes. The largest and the smallest scale multiply to 1 (section 3.2, equations 4 and 5; the paper's
    code takes the error behind the whole attention or MLP, for some of the tokens).

    Raises InvalidArgumentError as `quantize_rtn` does, and for tensors that do not fit.
    """
    weight = check_weight(weight)
    hessian = _fitting(hessian, weight)
    if magnitudes.shape != weight.shape[1:]:
        raise InvalidArgumentError(
            f"magnitudes has shape {list(magnitudes.shape)}: for a weight of {weight.shape[1]} inputs it must be [in]."
        )
    magnitudes = magnitudes.to(weight)
    if not magnitudes.isfinite().all():
        raise InvalidArgumentError("magnitudes holds NaN or infinity: give the mean of |x| of some inputs.")
    if steps < 1:
        raise InvalidArgumentError(f"steps={steps!r} is not valid: give a whole number from 1.")
    if source is not None:
        if source.shape != magnitudes.shape or source.dtype != torch.int64 or int(source.min()) < 0:
            raise InvalidArgumentError(
                f"source has dtype {source.dtype} and shape {list(source.shape)}: give int64 [in], from 0."
            )
        sums, counts = (torch.zeros(int(source.max()) + 1).to(weight) for _ in "12")
        sums.index_add_(0, source, magnitudes)
        counts.index_add_(0, source, torch.ones_like(magnitudes))
        magnitudes = (sums / counts)[source]
    errors, tried = [], []
    for step in range(steps):
        scales = magnitudes.clamp(min=_SMALLEST_MAGNITUDE) ** (step / steps)
        scales /= (scales.max() * scales.min()).sqrt()
        rounded = quantize_rtn(weight * scales, bits, group_size=group_size, symmetric=symmetric)
        errors.append(mean_square(rounded.dequantize().to(weight) / scales - weight, hessian))
        tried.append(scales)
    best = min(range(steps), key=errors.__getitem__)
    return ScaleSearch(tried[best], best / steps, errors)


def search_clip(
    weight: Tensor, hessian: Tensor, bits: int = 4, *, group_size: int | None = 64, symmetric: bool = False
) -> Tensor:
    """Return the largest |weight| that each group should keep, `[out, groups]`: 50 to 100 % of what it has.

    A group's choice minimises the error of the part of the output that its inputs make, so `hessian` `[in, in]` is
    used in blocks `[group_size, group_size]` along its diagonal. Raises InvalidArgumentError as `search_scales` does.
    """
    weight = check_weight(weight)
    size = check_group_size(weight.shape[1], group_size)
    hessian = _fitting(hessian, weight)
    groups = weight.unflatten(1, (-1, size))  # [out, groups, size]
    blocks = torch.stack([hessian[i : i + size, i : i + size] for i in range(0, len(hessian), size)])
    largest = groups.abs().amax(-1)  # [out, groups]
    best_error, best_limit = torch.full_like(largest, torch.inf), largest.clone()
    for step in range(_CLIP_STEPS + 1):
        limit = largest * (1 - (1 - _SMALLEST_CLIP) * step / _CLIP_STEPS)
        rounded = quantize_clipped(weight, limit, bits, symmetric=symmetric)
        off = (rounded.dequantize().to(weight) - weight).unflatten(1, (-1, size)).transpose(0, 1)
        error = ((off @ blocks) * off).sum(-1).T  # [groups, out, size] -> [out, groups]
        better = error < best_error
        best_error, best_limit = torch.where(better, error, best_error), torch.where(better, limit, best_limit)
    return best_limit


def quantize_clipped(weight: Tensor, limit: Tensor, bits: int = 4, *, symmetric: bool = False) -> QuantizedWeight:
    """Return `weight` `[out, in]` rounded to nearest, on grids for what of it lies within ±`limit` `[out, groups]`."""
    weight = check_weight(weight)
    check_bits(bits)
    if limit.dim() != 2 or len(limit) != len(weight) or not limit.numel() or weight.shape[1] % limit.shape[1]:
        raise InvalidArgumentError(
            f"limit has shape {list(limit.shape)}: for a weight {list(weight.shape)} it must be [out, groups]."
        )
    groups = weight.unflatten(1, (limit.shape[1], -1))
    low, high = (torch.clamp(edge, -limit, limit) for edge in (groups.amin(-1), groups.amax(-1)))
    return quantize_in_range(weight, low, high, bits, symmetric=symmetric)


def _fitting(hessian: Tensor, weight: Tensor) -> Tensor:
    if hessian.shape != (weight.shape[1],) * 2:
        raise InvalidArgumentError(
            f"hessian has shape {list(hessian.shape)}: for a weight of {weight.shape[1]} inputs it must be [in, in]."
        )
    hessian = hessian.to(weight)
    if not hessian.isfinite().all():
        raise InvalidArgumentError("hessian holds NaN or infinity: give the mean of 2xxᵀ of some inputs.")
    return hessian
