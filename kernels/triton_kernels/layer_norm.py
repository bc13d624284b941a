"""LayerNorm (Ba et al., arXiv 1607.06450) on a GPU, with or without the residual sum before it, in one kernel.

The statistics are float32's and take two passes over a row that is in registers: first the mean, then the squares of
what is left. Summing x and x² in one pass would cancel: a row around 1,000 with a spread of 0.01 has no digit left.
"""

import torch
import triton
import triton.language as tl

from .norm_rows import inverse_root, load_row, row_scale, run_on_rows


def layer_norm_spec(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return what the kernel must, x `[..., size]`: all in float32, and rounded to x's dtype once."""
    centred = x.float() - x.float().mean(dim=-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.float()
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype)


@triton.jit
def layer_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """One program computes one row of `size` elements, at most TILE; see `norm_rows.load_row` for the arguments."""
    x = load_row(x_ptr, residual_ptr, sum_ptr, x_row, residual_row, size, TILE, ADD)
    lane = tl.arange(0, TILE)
    there = lane < size

    scale = row_scale(x)
    x *= scale
    # Less its first element, a row that is constant has mean 0 to the last bit, and one far from 0 loses no digits.
    x = tl.where(there, x - tl.sum(tl.where(lane == 0, x, 0.0), axis=0), 0.0)
    x = tl.where(there, x - tl.sum(x, axis=0) / size, 0.0)
    out = x * inverse_root(tl.sum(x * x, axis=0) / size, eps, scale)

    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + lane, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + lane, mask=there, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + row * size + lane, out.to(out_ptr.dtype.element_ty), mask=there)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Return x `[..., size]` with each row shifted to mean 0 and scaled to variance 1, times `weight`, plus `bias`.

    `weight` and `bias` are `[size]`, of x's dtype. There is no gradient. Raises InvalidArgumentError, naming the
    argument, for tensors that the kernel cannot take.
    """
    return run_on_rows(layer_norm_kernel, x, None, {"weight": weight, "bias": bias}, eps)[0]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (layer_norm(x + residual), x + residual); x and residual are `[..., size]` and stay what they are.

    The sum is rounded to their dtype before it is normalised, as the unfused sum would be. Otherwise as `layer_norm`.
    """
    return run_on_rows(layer_norm_kernel, x, residual, {"weight": weight, "bias": bias}, eps)
