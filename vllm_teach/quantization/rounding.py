"""Rounding to nearest (RTN): the grid that a group of weights is rounded to, and the rounding.

Every method here ends on such a grid; they differ in which weights they round to it, and in what they choose it by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import BITS, QuantizedWeight

GRANULARITIES = ("group", "channel", "tensor")
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0  # of float16


def quantize_rtn(
    weight: Tensor,
    bits: int = 4,
    *,
    granularity: str = "group",
    group_size: int | None = 64,
    symmetric: bool = False,
    min_zero: int = 0,
) -> QuantizedWeight:
    """Return `weight` `[out, in]`, each number rounded to the nearest of the 2^bits that its grid has.

    A grid serves `group_size` inputs of one output channel, None for all of them; with `granularity` "channel" a whole
    output channel, with "tensor" the whole matrix. It reaches from the smallest to the largest weight, 0 always
    included and hit exactly; a `symmetric` one reaches equally far to both sides, its zero in the middle. With
    `min_zero` 1 each grid has a point below 0, for a format that stores no zero of 0 (GPTQ's version 1).

    Raises InvalidArgumentError for a `weight` that is no finite matrix, or too large for float16 scales, for unknown
    `bits`, `granularity` or `min_zero`, and for a `group_size` that does not divide the inputs.
    """
    weight = check_weight(weight)
    check_bits(bits)
    if granularity not in GRANULARITIES:
        raise InvalidArgumentError(
            f"granularity={granularity!r} is not valid: use one of {', '.join(map(repr, GRANULARITIES))}."
        )
    size = check_group_size(weight.shape[1], group_size if granularity == "group" else None)
    groups = weight.unflatten(1, (-1, size))  # [out, groups, size]
    low, high = groups.amin(-1), groups.amax(-1)
    if granularity == "tensor":
        low, high = low.min().expand_as(low), high.max().expand_as(high)
    return quantize_in_range(weight, low, high, bits, symmetric=symmetric, min_zero=min_zero)


def quantize_in_range(
    weight: Tensor, low: Tensor, high: Tensor, bits: int, *, symmetric: bool, min_zero: int = 0
) -> QuantizedWeight:
    """Return `weight` `[out, in]` rounded to grids that reach from `low` to `high`, `[out, groups]` each.

    What lies outside is rounded to the ends. Raises InvalidArgumentError for a range too large for float16 scales.
    """
    scales, zeros = choose_grid(low, high, bits, symmetric=symmetric, min_zero=min_zero)
    groups = weight.unflatten(1, (scales.shape[1], -1))  # [out, groups, size]
    codes = round_to_grid(groups, scales[..., None], zeros[..., None], bits)
    return QuantizedWeight(codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8), bits)


def choose_grid(low: Tensor, high: Tensor, bits: int, *, symmetric: bool, min_zero: int = 0) -> tuple[Tensor, Tensor]:
    """Return (scales, zeros) of grids that reach from `low` to `high`, tensors of one shape, and that contain 0.

    `scales` is float16, positive; `zeros`, in the dtype of `low`, holds whole numbers from `min_zero` to 2^bits - 1: a
    range that ends too near below 0 is stretched. One without extent gets the scale 1. Raises InvalidArgumentError for
    another `min_zero` than 0 or 1, and when a scale would exceed float16's largest number.
    """
    check_min_zero(min_zero)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        # All 2^bits codes are used although one side has one less: what this cuts off is half a step, as much as
        # rounding errs anyway.
        high = torch.maximum(-low, high)
        low = -high
    else:
        low = torch.minimum(low, high * (-min_zero / (2**bits - 1 - min_zero)))
    steps = (high - low) / (2**bits - 1)
    if steps.numel() and not float(steps.max()) <= LARGEST_SCALE:  # a NaN is not, either
        raise InvalidArgumentError(
            f"weight needs a scale of {float(steps.max()):.3g}, and float16 ends at 65504: divide the weight."
        )
    # Rounded to what is stored before anything is rounded to it.
    scales = steps.clamp(min=SMALLEST_SCALE).half().masked_fill(steps == 0, 1)
    if symmetric:
        return scales, torch.full_like(low, 2 ** (bits - 1))
    return scales, (-low / scales.to(low.dtype)).round().clamp(min_zero, 2**bits - 1)


def round_to_grid(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the codes of the grid points nearest to `weight`, whole numbers in its dtype; the arguments broadcast."""
    return (weight / scales.to(weight.dtype)).round().add(zeros).clamp(0, 2**bits - 1)


def check_weight(weight: Tensor) -> Tensor:
    """Return `weight` in float32, or in float64 where it is so; InvalidArgumentError unless it is a finite matrix."""
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel() or weight.is_meta:
        raise InvalidArgumentError(
            f"weight has dtype {weight.dtype} and shape {list(weight.shape)} on {weight.device}: give floating-point "
            "numbers [out, in]."
        )
    weight = weight.detach()
    weight = weight if weight.dtype == torch.float64 else weight.float()
    if not weight.isfinite().all():
        raise InvalidArgumentError("weight holds NaN or infinity: the model is damaged, load it again.")
    return weight


def check_bits(bits: int) -> None:
    """Raise InvalidArgumentError unless `bits` is a number of bits that weights can have here."""
    if not isinstance(bits, int) or bits not in BITS:
        raise InvalidArgumentError(f"bits={bits!r} is not valid: use one of {', '.join(map(str, BITS))}.")


def check_min_zero(min_zero: int) -> None:
    """Raise InvalidArgumentError unless `min_zero` is a smallest zero that a format can ask for."""
    if min_zero not in (0, 1):
        raise InvalidArgumentError(f"min_zero={min_zero!r} is not valid: use 0, or 1 for a format without zeros of 0.")


def check_group_size(in_features: int, group_size: int | None, name: str = "weight") -> int:
    """Return `group_size`, or `in_features` for None; `name` is the matrix that errors speak of.

    Raises InvalidArgumentError, naming the sizes that work, unless it divides `in_features` into whole groups.
    """
    if group_size is None:
        return in_features
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or in_features % group_size:
        sizes = [size for size in range(8, in_features + 1, 8) if in_features % size == 0] or [in_features]
        raise InvalidArgumentError(
            f"group_size={group_size!r} does not divide the {in_features} inputs of {name}: use one of "
            f"{', '.join(map(str, sizes))}, or None for whole rows."
        )
    return group_size
