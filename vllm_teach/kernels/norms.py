"""LayerNorm and RMSNorm over the last dimension, each also fused with the residual addition before it.

Operation by operation, a norm reads and writes its tensor half a dozen times; a kernel does it once. A C++ kernel
serves CPUs and a Triton kernel CUDA; what neither takes is left to PyTorch, and `explain` says which it is and why. The
statistics are float32's, or float64's of float64 tensors.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.layer_norm_gradient import LayerNormFunction
from vllm_teach.kernels.norm_paths import NormPath, choose_path, is_dense, run, wants_gradient

KINDS = ("layer_norm", "rms_norm")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` (Ba et al. 2016), of `x`'s shape and dtype.

    `x` is `[..., size]` with any strides, `weight` and `bias` are `[size]`; without them, 1 and 0. They have
    x's dtype, or float32 beside an x of 16 bits, and then PyTorch computes it. Rounds once. Autograd differentiates it
    as often as is asked. Raises InvalidArgumentError, naming the argument, for shapes, dtypes and an `eps` that make no
    norm.
    """
    _check(x, eps, weight=weight, bias=bias)
    _check_dtypes(x.dtype, weight=weight, bias=bias)
    path = choose_path("layer_norm", x, weight, bias, build=True)
    if path.name != "plain" and wants_gradient(x, weight, bias):
        return LayerNormFunction.apply(path, x, weight, bias, eps)
    return run(path, "layer_norm", x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual) in one pass; the arguments stay what they are.

    `x` and `residual` are `[..., size]`. The sum is rounded to their dtype (of two, the wider one) before it is
    normalised, as the unfused sum would be. Where a gradient is asked for, the addition is PyTorch's. Otherwise as
    `layer_norm`.
    """
    _check(x, eps, residual=residual, weight=weight, bias=bias)
    _check_dtypes(torch.promote_types(x.dtype, residual.dtype), weight=weight, bias=bias)
    path = choose_path("layer_norm", x, weight, bias, residual, build=True)
    if path.name != "plain" and wants_gradient(x, residual, weight, bias):
        total = x + residual
        return LayerNormFunction.apply(path, total, weight, bias, eps), total
    return run(path, "layer_norm", x, residual, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(mean of x^2 + eps) * weight` (Zhang and Sennrich 2019), of `x`'s shape and dtype.

    `x` is `[..., size]` with any strides, `weight` is `[size]`; without it, 1. As in transformers, the normalised value
    is rounded to `x`'s dtype before it is multiplied by the weight, and a weight of another dtype (autocast makes such)
    gives the product's dtype. Where a gradient is asked for, PyTorch computes it. Raises as `layer_norm`.
    """
    _check(x, eps, weight=weight)
    return run(choose_path("rms_norm", x, weight, build=True), "rms_norm", x, None, weight, None, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual) in one pass; the arguments stay what they are.

    `x` and `residual` are `[..., size]`. The sum is rounded to their dtype (of two, the wider one) before it is
    normalised, as the unfused sum would be. Otherwise as `rms_norm`.
    """
    _check(x, eps, residual=residual, weight=weight)
    path = choose_path("rms_norm", x, weight, residual, build=True)
    return run(path, "rms_norm", x, residual, weight, None, eps)


def explain(
    kind: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None
) -> NormPath:
    """Return what computes `kind`, "layer_norm" or "rms_norm", of such tensors, and why; builds and computes nothing.

    Raises InvalidArgumentError for another kind.
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    return choose_path(kind, x, weight, bias, residual)


def _check(x: Tensor, eps: float, residual: Tensor | None = None, **parameters: Tensor | None) -> None:
    tensors = {"residual": residual, **parameters}
    for name, tensor in {"x": x, **tensors}.items():
        if not ((tensor is None and name != "x") or is_dense(tensor)):
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise InvalidArgumentError(f"{name} is of the kind {kind}; give a dense tensor.")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InvalidArgumentError(f"x has shape {list(x.shape)}; give [..., size] with a size of at least 1.")
    if x.dtype not in _DTYPES:
        raise InvalidArgumentError(f"x has dtype {x.dtype}; give a floating-point tensor, of 16 bits at least.")
    if not isinstance(eps, float | int) or not 0 <= eps <= sys.float_info.max:
        raise InvalidArgumentError(f"eps is {eps!r:.80}; give 0 or a positive number.")
    if residual is not None and residual.shape != x.shape:
        raise InvalidArgumentError(f"residual has shape {list(residual.shape)}; give x's, {list(x.shape)}.")
    for name, tensor in parameters.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; give [{x.shape[-1]}], x's last size.")
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.device != x.device or tensor.dtype not in _DTYPES):
            raise InvalidArgumentError(
                f"{name} is {tensor.dtype} on {tensor.device}; give a floating-point tensor on x's device, {x.device}."
            )


def _check_dtypes(dtype: torch.dtype, **parameters: Tensor | None) -> None:
    """Raise InvalidArgumentError for parameters that PyTorch's LayerNorm does not take with an `x` of `dtype`."""
    taken = (dtype,) if dtype.itemsize > 2 else (dtype, torch.float32)
    for name, tensor in parameters.items():
        if tensor is not None and tensor.dtype not in taken:
            raise InvalidArgumentError(
                f"{name} has dtype {tensor.dtype}; give {' or '.join(map(str, taken))}, as x has {dtype}."
            )
