"""The CUDA norm kernels as Python functions, and the structure of `kernels/cuda/layer_norm.cu` that they take.

`vllm_teach.kernels.norms` takes the Triton kernels on a GPU: these are there to be read, measured and called directly.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.kernels import cuda_build
from vllm_teach.kernels.matrix_rows import as_rows, check_alike

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # numbered as norm_launch counts them
KINDS = ("rms_norm", "layer_norm")  # the same
_MOST = 2**30  # rows, and elements of one


class NormCall(Structure):
    """One norm over the rows of a matrix, field by field as in layer_norm.cu."""

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
        ("eps", c_float),
    )


def unavailable() -> str | None:
    """Return why the kernels cannot run here, or None; see `cuda_build.why_not`. Builds nothing."""
    return cuda_build.why_not()


def norm(
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (norm of x, x), or (norm of x + residual, x + residual); `kind` is "layer_norm" or "rms_norm".

    `x` and `residual` have one shape, `[..., size]`, any strides, and one of DTYPES; `weight` and `bias` are `[size]`.
    All are of one dtype and on one CUDA device, on whose current stream the kernel runs.

    Raises MissingDependencyError where `unavailable` has a reason, InvalidArgumentError for an x elsewhere, and
    otherwise as `launch`.
    """
    library = cuda_build.load_library()
    if x.device.type != "cuda":
        raise InvalidArgumentError(f"x is on {x.device}; move it to a CUDA device.")
    with torch.cuda.device_of(x):  # CUDA launches on the current device, which need not be x's
        return launch(library, kind, x, residual, weight, bias, eps, torch.cuda.current_stream().cuda_stream)


def launch(
    library: ctypes.CDLL,
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    stream: int | None,
) -> tuple[Tensor, Tensor]:
    """Call `norm_launch` of `library` on `stream`, its number or None for CUDA's default; otherwise as `norm`.

    Raises InvalidArgumentError for tensors that the kernel cannot take or that do not fit together, and for more than
    2**30 rows, or elements of a row; VllmTeachError when CUDA does not start the kernel.
    """
    if x.dim() == 0 or x.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"x has shape {list(x.shape)} and dtype {x.dtype}; give [..., size] in float16, bfloat16 or float32."
        )
    check_alike(x, residual, {"weight": weight, "bias": bias})
    if max(x.shape[-1], x.numel() // max(x.shape[-1], 1)) > _MOST:
        raise InvalidArgumentError(f"x has shape {list(x.shape)}; the kernel takes up to 2**30 rows and columns.")
    rows = as_rows(x)
    added = None if residual is None else as_rows(residual)
    held = [None if each is None else each.resolve_neg().contiguous() for each in (weight, bias)]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if out.numel() == 0:
        return out, total
    call = NormCall(
        rows.data_ptr(),
        None if added is None else added.data_ptr(),
        *(None if each is None else each.data_ptr() for each in held),
        out.data_ptr(),
        None if added is None else total.data_ptr(),
        rows.stride(0),
        0 if added is None else added.stride(0),
        len(rows),
        x.shape[-1],
        eps,
    )
    library.norm_launch.argtypes = (c_void_p, c_int, c_int, c_void_p)
    library.norm_launch.restype = c_char_p
    complaint = library.norm_launch(byref(call), DTYPES.index(x.dtype), KINDS.index(kind), stream)
    if complaint is not None:
        raise VllmTeachError(f"CUDA did not start the norm of x, of shape {list(x.shape)}: {complaint.decode()}.")
    return out, total
