"""Which implementation computes a norm: a kernel that reads and writes memory once, or PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from vllm_teach.errors import MissingDependencyError
from vllm_teach.kernels import cpu_norms, plain_norms


@dataclass(frozen=True)
class NormPath:
    """A choice and its reason; prints as "cpu: …"."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


_CPU = NormPath("cpu", "the C++ kernel computes it in one pass over memory.")
_TRITON = NormPath("triton", "the Triton kernel computes it in one pass over memory.")


def choose_path(kind: str, x: Tensor, *others: Tensor | None, build: bool = False) -> NormPath:
    """Return how `kind`, "layer_norm" or "rms_norm", of `x` is computed; `others` are its weight, bias and residual.

    With `build`, a CPU kernel that is not there yet is built, and the answer is certain; without, nothing is.
    """
    if (reason := _no_kernel(kind, x, others)) is not None:
        return NormPath("plain", reason)
    if x.device.type == "cpu":
        if not (build and cpu_norms.loads()) and (reason := cpu_norms.unavailable()) is not None:
            return NormPath("plain", reason)
        return _CPU
    if (reason := _no_triton(x)) is not None:
        return NormPath("plain", reason)
    return _TRITON


def run(
    path: NormPath,
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (norm of x, x), or (norm of x + residual, x + residual), computed as `path` says."""
    if path is _CPU:
        return cpu_norms.norm(kind, x, residual, weight, bias, eps)
    if path is _TRITON:
        return _run_triton(kind, x, residual, weight, bias, eps)
    total = x if residual is None else x + residual
    if kind == "rms_norm":
        return plain_norms.rms_norm(total, weight, eps), total
    return plain_norms.layer_norm(total, weight, bias, eps), total


def is_dense(x: object) -> bool:
    """Return whether `x` is a tensor with strides."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def has_memory(x: Tensor) -> bool:
    """Return whether a kernel finds the numbers of `x` at its address: not those of a subclass, which has its own."""
    return type(x) in (Tensor, Parameter) and not x._is_zerotensor()


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd follows one of `tensors`."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _no_kernel(kind: str, x: Tensor, others: Iterable[Tensor | None]) -> str | None:
    """Return why no kernel serves the call, on whichever device, or None."""
    if x.dtype not in cpu_norms.DTYPES:
        return f"the kernels know float32, bfloat16 and float16, and x has dtype {x.dtype}."
    for each in others:
        if each is not None and (each.dtype != x.dtype or each.device != x.device):
            return f"x is {x.dtype} on {x.device}, and another tensor is {each.dtype} on {each.device}."
    if not all(each is None or has_memory(each) for each in (x, *others)):
        return "a tensor without numbers in memory (a fake one, or zeros put off) is PyTorch's to compute with."
    if kind == "rms_norm" and wants_gradient(x, *others):
        return "a gradient is asked for, which PyTorch's operations have."
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func and forward-mode differentiation see PyTorch's operations alone."
    return None


def _no_triton(x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"there is no kernel for tensors on {x.device}."
    try:
        from vllm_teach.kernels.triton_kernels.norm_rows import LARGEST_SIZE
    except MissingDependencyError as error:
        return str(error)
    if x.shape[-1] > LARGEST_SIZE:
        return f"the Triton kernel takes rows of at most {LARGEST_SIZE:,} elements, and x has {x.shape[-1]:,}."
    return None


def _run_triton(
    kind: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    from vllm_teach.kernels.triton_kernels.layer_norm import layer_norm_kernel
    from vllm_teach.kernels.triton_kernels.norm_rows import run_on_rows
    from vllm_teach.kernels.triton_kernels.rms_norm import rms_norm_kernel

    if kind == "rms_norm":
        return run_on_rows(rms_norm_kernel, x, residual, {"weight": weight}, eps)
    return run_on_rows(layer_norm_kernel, x, residual, {"weight": weight, "bias": bias}, eps)
