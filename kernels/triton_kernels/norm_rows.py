"""What the norm kernels share: one program computes one row, which it reads once and holds in registers from then on.

The eager versions are several kernels that each read and write the whole tensor; here a row passes through the chip
once. The residual sum before a norm rides along: adding it costs one more read and one more write, not three and two.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.matrix_rows import as_rows, check_alike

from .problem import DTYPES, check_device

# A longer row would not fit the registers of one program.
LARGEST_SIZE = 65_536


@triton.jit
def load_row(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
) -> tl.tensor:
    """Return this program's row in float32 `[TILE]`, 0 from `size` on.

    With ADD it is x + residual, rounded to the tensors' dtype as the unfused sum would be, and written to `sum`, whose
    rows lie behind one another.
    """
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2**31 elements
    lane = tl.arange(0, TILE)
    there = lane < size
    x = tl.load(x_ptr + row * x_row + lane, mask=there, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_row + lane, mask=there, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * size + lane, x, mask=there)
    return x.to(tl.float32)


@triton.jit
def row_scale(x: tl.tensor) -> tl.tensor:
    """Return the power of two by which a row is scaled, so that no sum of squares overflows: 1 for nearly every row."""
    return tl.where(tl.max(tl.abs(x), axis=0) > 1e15, 2.0**-80, 1.0)


@triton.jit
def inverse_root(mean_square: tl.tensor, eps: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return 1 / sqrt(mean_square + eps) for a row that was scaled; what eps becomes of that must not vanish."""
    return tl.rsqrt(mean_square + tl.maximum(eps * scale * scale, 1.2e-38))


def run_on_rows(
    kernel: triton.JITFunction,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    parameters: dict[str, torch.Tensor | None],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised, sum), both contiguous and like `x` `[..., size]`; the sum is `x` itself without a residual.

    `parameters` are `weight` and `bias`, `[size]`, or None. Rows may lie apart; the elements of a row are adjacent, or
    are copied. Raises InvalidArgumentError, naming the argument, for what the kernels cannot take.
    """
    _check(x, residual, parameters)
    size = x.shape[-1]
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    arguments: dict[str, Any] = {}
    for name, tensor in parameters.items():
        arguments[f"{name}_ptr"] = out if tensor is None else tensor.resolve_neg().contiguous()  # out: not read
        arguments[f"HAS_{name.upper()}"] = tensor is not None
    tile = triton.next_power_of_2(size)
    if len(rows) > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
            kernel[(len(rows),)](
                x_ptr=rows, residual_ptr=others, out_ptr=out, sum_ptr=total, x_row=rows.stride(0),
                residual_row=others.stride(0), size=size, eps=float(eps), TILE=tile, ADD=residual is not None,
                num_warps=warps(tile), **arguments,
            )  # fmt: skip
    return out, total


def warps(tile: int) -> int:
    """Return how many warps of 32 threads work on a row of `tile` elements: 8 elements a thread where that can be."""
    return min(32, max(1, tile // 256))


def _check(x: torch.Tensor, residual: torch.Tensor | None, parameters: dict[str, torch.Tensor | None]) -> None:
    if x.dim() == 0 or not 1 <= x.shape[-1] <= LARGEST_SIZE:
        raise InvalidArgumentError(
            f"x has shape {list(x.shape)}; give [..., size] with a size from 1 to {LARGEST_SIZE}."
        )
    if x.dtype not in DTYPES:
        raise InvalidArgumentError(f"x has dtype {x.dtype}; the kernels take float16, bfloat16 and float32.")
    check_alike(x, residual, parameters)
    check_device(x, "x")
