"""Compile the kernels for GPUs that are not here: Triton needs none for that, and its compiler refuses what the
interpreter lets pass. What comes back also says whether a tile fits: its shared memory is known before it runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import tuning
from .backward_math import delta_kernel
from .block_sparse_forward import block_sparse_forward_kernel
from .dequantize_matmul import PART, STORED_BITS, dequantize_matmul_kernel, stages
from .flash_backward import flash_backward_keys_kernel, flash_backward_queries_kernel
from .flash_forward import flash_forward_kernel
from .merge_splits import merge_splits_kernel
from .paged_decode import paged_attention_kernel
from .tile_math import dot_precision, padded

# Shared memory that one program may use, bytes, by compute capability (CUDA C++ programming guide, table of technical
# specifications): A100 163 KiB; RTX 30 and 40 99 KiB; H100 and B200 227 KiB.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

# The kernels that work on tiles of scores, by the name of their candidates in `tuning`.
TILED = {
    "forward": flash_forward_kernel,
    "backward_keys": flash_backward_keys_kernel,
    "backward_queries": flash_backward_queries_kernel,
    "block_sparse": block_sparse_forward_kernel,
    "paged": paged_attention_kernel,
}
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_FLOAT32 = ("lse_ptr", "delta_ptr", "slopes_ptr", "parts_ptr", "part_lse_ptr")
_FLOAT16 = ("scales_ptr",)
_BYTES = ("masks_ptr", "codes_ptr", "zeros_ptr")
_INT32 = ("cu_q_ptr", "cu_k_ptr", "table_ptr", "kv_lens_ptr", "starts_ptr", "full_ends_ptr", "k_tile_ptr",
          "mask_index_ptr")  # fmt: skip
_MULTIPLES_OF_16 = ("_ptr", "_row", "_head", "_block", "_slot", "_features")
_FLOATS = ("scale", "softcap", "keep_scale", "eps")
FEATURES = ("VARLEN", "LEFT", "RIGHT", "SOFTCAP", "ALIBI", "DROPOUT")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU generation: its PTX, the machine code's size, and the shared memory it needs, bytes."""

    ptx: str
    machine_code_bytes: int
    shared_bytes: int


def compile_tiled(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    capability: int,
    tile: tuning.Tile,
    features: tuple[str, ...] = ("RIGHT",),
) -> Compiled:
    """Compile a kernel of TILED with `tile` for sm_`capability`, with those of FEATURES turned on that it has."""
    function = TILED[kernel]
    flags = {name: name in features for name in FEATURES if name in function.arg_names}
    constants = {"HEAD_DIM": head_dim, "DIM": padded(head_dim), "PRECISION": dot_precision(dtype), **flags}
    if kernel == "paged":
        constants["BLOCK_SIZE"] = 16
    constants |= {"TILE_Q": tile.q, "TILE_K": tile.k}
    return compile_kernel(function, dtype, capability, constants, tile.warps, tile.stages)


def compile_small(dtype: torch.dtype, capability: int, head_dim: int = 128) -> Iterator[Compiled]:
    """Compile the two kernels that have no tile of scores: delta, and the merge of splits."""
    sizes = {"HEAD_DIM": head_dim, "DIM": padded(head_dim)}
    yield compile_kernel(delta_kernel, dtype, capability, sizes | {"TILE_Q": 64})
    yield compile_kernel(merge_splits_kernel, dtype, capability, sizes | {"SPLITS": 16})


def compile_dequantize(dtype: torch.dtype, capability: int, bits: int, one_group: bool = True) -> Compiled:
    """Compile the product with weights of `bits` bits; `one_group` where a group has whole tiles of columns."""
    tile_m = 64 if dtype.itemsize == 2 else 16
    sizes = {"STORED": STORED_BITS[bits], "PART": PART, "TILE_M": tile_m, "TILE_N": 64}
    constants = {**sizes, "ONE_GROUP": one_group, "BIAS": True, "PRECISION": dot_precision(dtype)}
    return compile_kernel(dequantize_matmul_kernel, dtype, capability, constants, stages=stages(one_group))


def compile_kernel(
    function: triton.JITFunction,
    dtype: torch.dtype,
    capability: int,
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 2,
) -> Compiled:
    """Compile `function` for sm_`capability` with tensors of `dtype`; `constants` are its tl.constexpr arguments.

    Pointers, strides, features and a row's size count as multiples of 16, as PyTorch's tensors have them. Raises what
    Triton's compiler raises.
    """
    signature, attributes = {}, {}
    for index, parameter in enumerate(function.params):
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else _type(parameter.name, dtype)
        if parameter.name == "size" or parameter.name.endswith(_MULTIPLES_OF_16):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return Compiled(compiled.asm["ptx"], len(compiled.asm["cubin"]), compiled.metadata.shared)


def _type(name: str, dtype: torch.dtype) -> str:
    if name in _FLOAT32:
        return "*fp32"
    if name in _FLOAT16:
        return "*fp16"
    if name in _BYTES:
        return "*u8"
    if name in _INT32:
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{_TYPES[dtype]}"
    return "fp32" if name in _FLOATS else "i32"


def main() -> None:
    """Print, for every candidate tile, the shared memory it needs on three generations; takes minutes."""
    for kernel in TILED:
        for head_dim in (64, 128, 256):
            for dtype in (torch.bfloat16, torch.float32):
                for tile in tuning.candidates(kernel, head_dim, dtype):
                    needs = {sm: compile_tiled(kernel, head_dim, dtype, sm, tile).shared_bytes for sm in (80, 90, 100)}
                    shown = ", ".join(f"sm_{sm} {size / 1024:.0f} KiB" for sm, size in needs.items())
                    print(f"{kernel:<17} head_dim {head_dim:<4} {dtype!s:<15} {tile!s:<30} {shown}", flush=True)


if __name__ == "__main__":
    main()
