"""LayerNorm with a backward pass of its own, around whichever implementation computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_teach.kernels.norm_paths import NormPath, run


class LayerNormFunction(torch.autograd.Function):
    """`apply(path, x, weight, bias, eps)` returns the LayerNorm of `x` `[..., size]`; weight and bias may be None.

    Of the forward pass only its inputs are kept. The backward pass reads x in any case, and computes the statistics
    from it once more; made of PyTorch's operations, it can be differentiated itself.
    """

    @staticmethod
    def forward(ctx: Any, path: NormPath, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """See `norm_paths.run`."""
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return run(path, "layer_norm", x, None, weight, bias, eps)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, computed in float32, in float64 for float64 inputs.

        With n = (x - mean) / deviation, y = n * weight + bias and g = dy * weight, the gradient of n:
        dx = (g - mean(g) - n * mean(g * n)) / deviation. Means are taken over `size`: how a row's own mean and
        deviation answer to its elements.
        """
        x, weight, bias = ctx.saved_tensors
        _, x_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad
        wide = torch.promote_types(x.dtype, torch.float32)
        dy = dy.to(wide).reshape(-1, dy.shape[-1])  # [rows, size], as all below
        n, inverse_deviation = _normalise(x.to(wide).reshape(dy.shape), ctx.eps)
        dx = dweight = dbias = None
        if x_wanted:
            g = dy if weight is None else dy * weight.to(wide)
            dx = (g - _mean(g) - n * _mean(g * n)) * inverse_deviation
            dx = dx.to(x.dtype).view(x.shape)
        if weight_wanted:
            dweight = (dy * n).sum(dim=0).to(weight.dtype)
        if bias_wanted:
            dbias = dy.sum(dim=0).to(bias.dtype)
        return None, dx, dweight, dbias, None


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of `x` `[rows, size]` and what they were multiplied by, `[rows, 1]`."""
    centered = x - _mean(x)
    inverse_deviation = torch.rsqrt(_mean(centered.square()) + eps)
    return centered * inverse_deviation, inverse_deviation


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)
