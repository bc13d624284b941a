"""Products with quantised weights on the CPU that never hold the full-precision matrix: `kernels/cpu/matmul/`.

`pack` lays a weight out as the kernel reads it, once; `matmul` then reads half a byte of memory for a weight of 4 bits
where a bfloat16 matrix needs two, which sets the pace while few tokens are computed at a time. The codes stay exact,
all sums are float32, and a token's result does not depend on the other tokens of the call, to the last bit.

Without a compiler the same products are computed in plain PyTorch, a tile of rows at a time: `path` tells, and
`unavailable` why.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from ctypes import c_char_p, c_int
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_library
from vllm_teach.kernels.packed_weight import PANEL_ROWS, PackedWeight, dequantize_rows, pack, rows, unpack

__all__ = ["PackedWeight", "gated_matmul", "matmul", "pack", "path", "rows", "unavailable", "unpack"]

_TILE_PANELS = 16  # of the plain path: 256 rows at a time

# Each dtype's number in call.h.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = tuple(_TYPES)

# The fields of `Call` in call.h, in order; all have 64 bits.
CALL_FIELDS = ("x", "out", "bias", "x_type", "out_type", "x_stride", "tokens", "gated", "threads")
_CALL = struct.Struct(f"{len(CALL_FIELDS)}q")


def unavailable() -> str | None:
    """Return why the C++ kernel cannot be used here, or None. Builds nothing."""
    return cpu_library.unavailable("matmul")


def path() -> str:
    """Return what `matmul` computes with: "cpp", the kernel, or "torch", where `unavailable` has a reason."""
    return "cpp" if unavailable() is None else "torch"


def matmul(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """Return x wᵀ + bias, `[tokens, out_features]`, for `x` `[tokens, in_features]`, rounded once to `out_dtype`.

    x and the result are float32, bfloat16 or float16 (by default both the same); `bias` is `[out_features]`. Products
    are exact or float32, sums float32. Runs in `torch.get_num_threads()` threads; the first call builds the kernel.
    `isa` is the instruction set, the best one by default; see `cpu_library.isa`. An infinite x gives NaN, and where the
    processor multiplies pairs of bfloat16 ("avx512_bf16"), those below 2**-126 count as 0.

    Raises InvalidArgumentError for arguments that do not fit, and where a gradient is asked for.
    """
    return _product(x, packed, bias, out_dtype, False, isa)


def gated_matmul(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """Return silu(x gᵀ) · (x uᵀ), `[tokens, out_features / 2]`, where g are the first and u the other half of the rows.

    As `matmul`, with nothing rounded in between: SwiGLU's gate and up projection in one call.
    """
    return _product(x, packed, bias, out_dtype, True, isa)


def _product(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None, gated: bool, isa: str | None
) -> Tensor:
    # Written for speed: while one token is decoded, a call takes some microseconds in all, and a step makes a hundred.
    shape, dtype = x.shape, x.dtype
    out_dtype = out_dtype or dtype
    if len(shape) != 2 or shape[1] != packed.in_features or dtype not in _TYPES or out_dtype not in _TYPES:
        raise InvalidArgumentError(
            f"x has shape {list(shape)} and dtype {dtype}, the result dtype {out_dtype}: the shape must be "
            f"[tokens, {packed.in_features}], and the dtypes float32, bfloat16 or float16."
        )
    if x.device != packed.panels.device or x.layout is not torch.strided:
        raise InvalidArgumentError(
            f"x has layout {x.layout} on {x.device}, and the weight is on {packed.panels.device}: give a dense tensor "
            "there."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgumentError(
            "x requires a gradient, which a quantised product has not: use torch.no_grad() or the unquantised weight."
        )
    if bias is not None:
        if bias.shape != (packed.out_features,) or not bias.is_floating_point() or bias.device != x.device:
            raise InvalidArgumentError(
                f"bias has shape {list(bias.shape)} and dtype {bias.dtype} on {bias.device}: use floating-point "
                f"numbers [{packed.out_features}] on {x.device}."
            )
        bias = bias.detach().float().resolve_neg().contiguous()
    if gated and packed.out_features % 2:
        raise InvalidArgumentError(f"packed has {packed.out_features} rows: gate and up must have half of them each.")
    tokens, width = shape[0], packed.out_features // 2 if gated else packed.out_features
    function = _function(packed.stored_bits, isa)
    if function is None or tokens == 0 or _seen_by_functorch():
        return _plain(x, packed, bias, gated).to(out_dtype)
    if gated and width % PANEL_ROWS:  # a panel has rows of both
        return _gate(_product(x, packed, bias, torch.float32, False, isa)).to(out_dtype)
    stride, address = x.stride(), x.data_ptr()
    if stride[1] != 1 or x.is_neg() or not address:  # put off negations, and zeros without memory
        x = x.clone(memory_format=torch.contiguous_format)
        stride, address = x.stride(), x.data_ptr()
        if not address:
            raise InvalidArgumentError(f"x is a {type(x).__name__} without numbers in memory: give a tensor with them.")
    out = x.new_empty((tokens, width), dtype=out_dtype)
    bias_address = 0 if bias is None else bias.data_ptr()
    types, threads = (_TYPES[dtype], _TYPES[out_dtype]), cpu_library.threads()
    call = _CALL.pack(address, out.data_ptr(), bias_address, *types, stride[0], tokens, gated, threads)
    if function(packed.structure, call):
        raise MemoryError("The CPU matmul kernel could not allocate its working memory.")
    return out


# Inside of torch.func's transforms a tensor stands for others.
_seen_by_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


@lru_cache(maxsize=16)
def _function(stored_bits: int, isa: str | None) -> Callable[[bytes, bytes], int] | None:
    """Return the kernel, built where it is missing; without `isa` None, with a warning, where it cannot be built."""
    try:
        library = cpu_library.load_library("matmul", isa)
    except MissingDependencyError as error:
        if isa is not None:
            raise
        warnings.warn(f"Quantised weights are multiplied in plain PyTorch. {error}", stacklevel=4)
        return None
    function = library[f"matmul_int{stored_bits}"]
    function.argtypes, function.restype = (c_char_p, c_char_p), c_int
    return function


def _plain(x: Tensor, packed: PackedWeight, bias: Tensor | None, gated: bool) -> Tensor:
    """Return the product in float32 by PyTorch's own operators; one tile of rows is dequantised at a time."""
    x, tiles = x.float(), []
    for parts in zip(*(view.split(_TILE_PANELS) for view in packed.views()), strict=True):
        words, scales, zeros = (part.transpose(1, 2).flatten(0, 1) for part in parts)
        tiles.append(F.linear(x, dequantize_rows(words, scales, zeros, packed)))
    out = torch.cat(tiles, dim=1)[:, : packed.out_features]
    out = out if bias is None else out + bias
    return _gate(out) if gated else out


def _gate(out: Tensor) -> Tensor:
    gate, up = out.chunk(2, dim=1)
    return F.silu(gate) * up
