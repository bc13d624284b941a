"""Row softmax on a GPU with the online recurrence: one pass over a row for (m, l), and one to write it.

A textbook softmax passes over its row three times: for the largest element, for the sum, and to write. The online
recurrence (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3) gets the first two in one pass, and takes a row of
any length, as only one tile of it is held at a time. `vllm_teach.attention.online_softmax` is the same with values.
"""

import torch
import triton
import triton.language as tl

from vllm_teach.errors import InvalidArgumentError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def online_softmax_spec(x: torch.Tensor) -> torch.Tensor:
    """Return what the kernel must: the softmax of each row of x `[rows, cols]`, in float32, as x's dtype."""
    nothing = (x == float("-inf")).all(dim=1, keepdim=True)  # [rows, 1]; softmax gives NaN there, the kernel 0
    return torch.softmax(x.float(), dim=1).masked_fill(nothing, 0.0).to(x.dtype)


@triton.jit
def online_softmax_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    cols: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program computes one row of `cols` elements, TILE at a time; elements of a row are adjacent in memory."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2**31 elements
    x_row = x_ptr + row * x_row_stride
    out_row = out_ptr + row * out_row_stride
    lane = tl.arange(0, TILE)

    m = float("-inf")  # the largest element so far
    l = 0.0  # the sum of exp(x - m) so far  # noqa: E741
    for start in range(0, cols, TILE):
        x = tl.load(x_row + start + lane, mask=start + lane < cols, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
        l = l * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)  # noqa: E741
        m = m_new

    shift = tl.where(m == float("-inf"), 0.0, m)
    denominator = tl.where(l == 0, 1.0, l)  # 0 only if all is -inf; NaN, from NaN or +inf in the row, must stay
    for start in range(0, cols, TILE):
        seen = start + lane < cols
        x = tl.load(x_row + start + lane, mask=seen, other=float("-inf")).to(tl.float32)
        tl.store(out_row + start + lane, (tl.exp(x - shift) / denominator).to(out_ptr.dtype.element_ty), mask=seen)


def online_softmax(x: torch.Tensor, tile: int = 1024) -> torch.Tensor:
    """Return the softmax of each row of x `[rows, cols]`, with statistics in float32, in x's dtype.

    `tile`, a power of two, is how many elements a program holds at once. A row of only -inf gives 0, and a row with
    NaN or +inf in it gives NaN.

    Raises InvalidArgumentError for another rank, dtype, tile or device.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"x has shape {list(x.shape)} and dtype {x.dtype}; give [rows, cols] in float16, bfloat16 or float32."
        )
    if type(tile) is not int or not 1 <= tile <= tl.TRITON_MAX_TENSOR_NUMEL or tile & (tile - 1):
        raise InvalidArgumentError(f"tile is {tile!r}; give a power of two up to {tl.TRITON_MAX_TENSOR_NUMEL}.")
    interpreted = triton.knobs.runtime.interpret
    if x.device.type != "cuda" and not (interpreted and x.device.type == "cpu"):
        raise InvalidArgumentError(
            f"x is on {x.device}; move it to a CUDA device, or set TRITON_INTERPRET=1 before importing this module and "
            "move it to the CPU."
        )
    if interpreted and x.dtype == torch.bfloat16:
        raise InvalidArgumentError(
            "x has dtype torch.bfloat16, which Triton's interpreter rounds towards zero; use float16 or float32 there."
        )
    x = x.resolve_neg().contiguous()
    out = torch.empty_like(x)
    rows, cols = x.shape
    if rows > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
            online_softmax_kernel[(rows,)](x, out, x.stride(0), out.stride(0), cols, TILE=tile)
    return out
