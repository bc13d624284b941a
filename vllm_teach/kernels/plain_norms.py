"""LayerNorm and RMSNorm in PyTorch's own operations: where no kernel serves, and with PyTorch's gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension of `x` `[..., size]`."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `x / sqrt(mean of x^2 + eps)`, rounded to `x`'s dtype, times `weight`; the mean is taken in float32."""
    normalised = F.rms_norm(x, x.shape[-1:], eps=eps)
    return normalised if weight is None else weight * normalised
