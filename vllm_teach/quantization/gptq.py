"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round column after column, each time mending the columns to come.

When input i of every row is rounded, the error that this makes in the outputs can partly be undone by the weights not
rounded yet. The best correction follows from the inverse of the Hessian of those weights; its Cholesky factor holds
one row of each such inverse (the algorithm's third step, "Cholesky reformulation").
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import QuantizedWeight
from vllm_teach.quantization.rounding import check_bits, check_group_size, check_weight, choose_grid, round_to_grid

# The columns behind are corrected for this many columns at once, by a matrix product (the second step, "lazy
# batch-updates").
_LAZY_COLUMNS = 64


@dataclass(frozen=True, eq=False)
class InverseFactor:
    """The upper Cholesky factor of the inverse Hessian, float64 `[in, in]`, and how it came about.

    `order`, int64 `[in]`, is the order in which inputs are rounded, None for their own; `upper` follows it. `damping`
    is the share of the mean diagonal that was added, which is more than was asked for when that did not suffice.
    """

    upper: Tensor
    order: Tensor | None
    damping: float


def quantize_gptq(
    weight: Tensor,
    hessian: Tensor | InverseFactor,
    bits: int = 4,
    *,
    group_size: int | None = 64,
    symmetric: bool = False,
    act_order: bool = False,
    damping: float = 0.01,
    min_zero: int = 0,
) -> QuantizedWeight:
    """Return `weight` `[out, in]` in `bits` bits, rounded so that its outputs change little on the calibration inputs.

    `hessian` is their `Hessian.matrix`, `[in, in]`; or what `invert_hessian` made of it, and then `act_order` and
    `damping` are not used. A grid serves `group_size` inputs of one output channel (None: all) and is chosen from the
    mended weights when the first of them is about to be rounded, as `quantize_rtn` does, whose `symmetric` and
    `min_zero` these are. `act_order` rounds the inputs with the largest second derivative first, and gives the result
    a `group_of`. Computed in float32, or in a float64 weight's dtype.

    Raises InvalidArgumentError as `quantize_rtn` and `invert_hessian` do, and for a Hessian of another size. Warns when
    the damping had to be raised.
    """
    weight = check_weight(weight)
    check_bits(bits)
    size = check_group_size(weight.shape[1], group_size)
    if isinstance(hessian, Tensor):
        hessian = invert_hessian(hessian, damping, act_order=act_order)
        if hessian.damping > damping:
            warnings.warn(
                f"the Hessian is not positive definite with damping={damping}: {hessian.damping:g} was used instead. "
                "More calibration text makes it so.",
                stacklevel=2,
            )
    if len(hessian.upper) != weight.shape[1]:
        raise InvalidArgumentError(
            f"hessian is for {len(hessian.upper)} inputs, and weight has {weight.shape[1]}: give that of its inputs."
        )
    order = None if hessian.order is None else hessian.order.to(weight.device)
    columns = (weight if order is None else weight[:, order]).T.clone(memory_format=torch.contiguous_format)
    grid = partial(choose_grid, bits=bits, symmetric=symmetric, min_zero=min_zero)
    codes, scales, zeros = _round_columns(columns, hessian.upper.to(columns), bits, size, grid)
    group_of = None
    if order is not None:
        place = order.argsort()  # of each input in the order of rounding
        codes, group_of = codes[:, place], (place // size).to(torch.int32)
    return QuantizedWeight(codes.contiguous(), scales, zeros, bits, group_of)


def invert_hessian(hessian: Tensor, damping: float = 0.01, *, act_order: bool = False) -> InverseFactor:
    """Return the factor of the inverse of `hessian` `[in, in]` that `quantize_gptq` works with.

    `damping` times the mean diagonal is added to the diagonal; where that leaves it not positive definite, ten times
    as much, and so on. An input that was always 0 (a dead column, without second derivative) gets the mean diagonal:
    as it is coupled to no other, it is then rounded to nearest. (The paper's code sets its weights to 0, which another
    text may need.) Computed in float64.

    Raises InvalidArgumentError for a Hessian that is not square, finite and of non-negative diagonal, and for a
    negative damping.
    """
    matrix = _check_hessian(hessian)
    check_damping(damping)
    diagonal = matrix.diagonal().clone()
    mean = float(diagonal.mean()) or 1.0
    order = diagonal.argsort(descending=True, stable=True) if act_order else None
    diagonal[diagonal == 0] = mean
    if order is not None:
        matrix, diagonal = matrix[order][:, order], diagonal[order]
    damping = float(damping)
    while math.isfinite(damping * mean):
        matrix.diagonal().copy_(diagonal + damping * mean)  # in place: nothing beside the model is as large as these
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and _fits_float32(upper):
            return InverseFactor(upper, order, damping)
        damping = max(10 * damping, 1e-6)
    raise InvalidArgumentError(
        f"hessian has a mean diagonal of {mean:.3g} and no damping makes it invertible: divide the inputs, or use the "
        "mean of 2xxᵀ of some (`Hessian.matrix`)."
    )


def _fits_float32(upper: Tensor) -> bool:
    """Return whether a Cholesky factor stays one in float32, in which most weights are rounded."""
    narrow = upper.float()
    return bool(narrow.isfinite().all()) and float(narrow.diagonal().min()) > 0


def check_damping(damping: float) -> None:
    """Raise InvalidArgumentError unless `damping` is a number of 0 or more."""
    if not (isinstance(damping, float | int) and 0 <= damping <= sys.float_info.max):
        raise InvalidArgumentError(f"damping={damping!r:.80} is not valid: give a share of 0 or more, as 0.01.")


def _round_columns(
    columns: Tensor, upper: Tensor, bits: int, size: int, grid: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes uint8 [out, in], scales [out, groups], zeros) of `columns` [in, out], which are used up.

    `grid` returns scales and zeros for the smallest and the largest weight of each output's group.
    """
    inputs, out = columns.shape
    codes = torch.empty(inputs, out, dtype=torch.uint8, device=columns.device)
    grids = []
    for start in range(0, inputs, size):
        group = columns[start : start + size]
        scales, zeros = grid(group.amin(0), group.amax(0))  # [out] each
        grids.append((scales, zeros.to(torch.uint8)))
        for first in range(start, start + size, _LAZY_COLUMNS):
            last = min(first + _LAZY_COLUMNS, start + size)
            errors = torch.empty(last - first, out, dtype=columns.dtype, device=columns.device)
            for i in range(first, last):
                code = round_to_grid(columns[i], scales, zeros, bits)
                error = errors[i - first]
                torch.sub(columns[i], (code - zeros) * scales.to(columns), out=error).div_(upper[i, i])
                columns[i + 1 : last].addr_(upper[i, i + 1 : last], error, alpha=-1)
                codes[i] = code
            columns[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
    all_scales, all_zeros = (torch.stack(each, 1) for each in zip(*grids, strict=True))
    return codes.T, all_scales, all_zeros


def _check_hessian(hessian: Tensor) -> Tensor:
    """Return a copy in float64, or raise InvalidArgumentError where there is no such Hessian."""
    if hessian.dim() != 2 or not 0 < len(hessian) == hessian.shape[1] or not hessian.is_floating_point():
        raise InvalidArgumentError(
            f"hessian has dtype {hessian.dtype} and shape {list(hessian.shape)}: give floating-point numbers [in, in]."
        )
    matrix = hessian.detach().to(torch.float64, copy=True)
    if not matrix.isfinite().all() or float(matrix.diagonal().min()) < 0:
        raise InvalidArgumentError(
            "hessian holds NaN or infinity, or a negative diagonal: give the mean of 2xxᵀ of some inputs "
            "(`Hessian.matrix`)."
        )
    return matrix
