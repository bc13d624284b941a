"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) on a GPU, with or without the residual sum before it, in one kernel.

It is LayerNorm without the mean, and rounds as transformers' Llama does: the normalised value is rounded to the
tensors' dtype before the weight multiplies it.
"""

import torch
import triton
import triton.language as tl

from .norm_rows import inverse_root, load_row, row_scale, run_on_rows


def rms_norm_spec(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return what the kernel must, x `[..., size]`: statistics in float32, rounded before the weight and after it."""
    out = (x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
    return out if weight is None else out * weight


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
) -> None:
    """One program computes one row of `size` elements, at most TILE; see `norm_rows.load_row` for the arguments."""
    x = load_row(x_ptr, residual_ptr, sum_ptr, x_row, residual_row, size, TILE, ADD)
    lane = tl.arange(0, TILE)
    there = lane < size

    scale = row_scale(x)
    x *= scale
    out = (x * inverse_root(tl.sum(x * x, axis=0) / size, eps, scale)).to(out_ptr.dtype.element_ty)

    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + lane, mask=there, other=0.0)
        out = (out.to(tl.float32) * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + row * size + lane, out, mask=there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """Return x `[..., size]` with each row scaled to root mean square 1, times `weight` `[size]`, of x's dtype.

    There is no gradient. Raises InvalidArgumentError, naming the argument, for tensors that the kernel cannot take.
    """
    return run_on_rows(rms_norm_kernel, x, None, {"weight": weight}, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); x and residual are `[..., size]` and stay what they are.

    The sum is rounded to their dtype before it is normalised, as the unfused sum would be. Otherwise as `rms_norm`.
    """
    return run_on_rows(rms_norm_kernel, x, residual, {"weight": weight}, eps)
