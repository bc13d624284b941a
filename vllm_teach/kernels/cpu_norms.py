"""The CPU norm kernels as Python functions, and the structure of `kernels/cpu/norms/call.h` that they take.

Nothing is checked here; `vllm_teach.kernels.norms` checks.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_teach.errors import MissingDependencyError
from vllm_teach.kernels import cpu_library
from vllm_teach.kernels.matrix_rows import as_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NormCall(Structure):
    """One norm over the rows of a matrix, field by field as in call.h."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("sum", c_void_p),
        ("x_stride", c_int64),
        ("residual_stride", c_int64),
        ("rows", c_int64),
        ("size", c_int64),
        ("eps", c_double),
        ("threads", c_int64),
    )


def unavailable() -> str | None:
    """Return why the kernels cannot run here, or None; see `cpu_build.why_not`. Builds nothing."""
    return cpu_library.unavailable("norms")


def loads() -> bool:
    """Return whether the kernels can run, building and loading them first; where not, `unavailable` knows why."""
    try:
        cpu_library.load_library("norms")
    except MissingDependencyError:
        return False
    return True


def norm(
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    isa_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (norm of x, x), or (norm of x + residual, x + residual); `kind` is "layer_norm" or "rms_norm".

    `x` and `residual` have one shape, `[..., size]`, any strides, and one of DTYPES; `weight` and `bias` are `[size]`.
    All are on the CPU and of one dtype. `isa_name` is the instruction set, `cpu_library.isa()` by default. Raises as
    `cpu_library.load_library`.
    """
    size = x.shape[-1]
    rows = as_rows(x)
    added = None if residual is None else as_rows(residual)
    held = [None if each is None else each.resolve_neg().contiguous() for each in (weight, bias)]
    out = x.new_empty(x.shape)
    total = x if residual is None else torch.empty_like(out)
    call = NormCall(
        rows.data_ptr(),
        None if added is None else added.data_ptr(),
        *(None if each is None else each.data_ptr() for each in held),
        out.data_ptr(),
        None if residual is None else total.data_ptr(),
        rows.stride(0),
        0 if added is None else added.stride(0),
        len(rows),
        size,
        eps,
        cpu_library.threads(),
    )
    _function(kind, x.dtype, isa_name)(byref(call))
    return out, total


@cache
def _function(kind: str, dtype: torch.dtype, isa_name: str | None) -> Any:
    function = cpu_library.load_library("norms", isa_name)[f"{kind}_{str(dtype).removeprefix('torch.')}"]
    function.restype = None
    return function
