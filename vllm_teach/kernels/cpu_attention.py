"""The CPU attention kernel as a Python function, and the structures of `kernels/cpu/attention/call.h` that it takes.

Nothing is checked here; `vllm_teach.backends.cpu` checks.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p

import torch

from vllm_teach.kernels import cpu_library

# Keys in one tile of a tile list; call.h says so too.
TILE_KEYS = 64
# An unlimited side of a band: further than any key.
UNLIMITED = 1 << 40

_FUNCTIONS = {
    torch.float32: "attention_float32",
    torch.bfloat16: "attention_bfloat16",
    torch.float16: "attention_float16",
}
DTYPES = tuple(_FUNCTIONS)


class Stride(Structure):
    """Elements from one token, head and block to the next."""

    _fields_ = (("row", c_int64), ("head", c_int64), ("block", c_int64))


class SequenceRow(Structure):
    """The sizes of one sequence, and where its first rows lie, in elements."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "q_len",
            "kv_len",
            "first_q",
            "first_k",
            "first_v",
            "first_out",
            "first_lse",
            "first_slope",
            "first_block",
            "tile_list",
        )
    )


class TileList(Structure):
    """The pointers of a `TileCsr`."""

    _fields_ = (("row_ptr", c_void_p), ("k_tile", c_void_p), ("mask_index", c_void_p), ("masks", c_void_p))


class Call(Structure):
    """One attention call, field by field as in call.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("q_stride", Stride),
        ("k_stride", Stride),
        ("v_stride", Stride),
        ("out_stride", Stride),
        ("lse_head_stride", c_int64),
        ("sequences", POINTER(SequenceRow)),
        ("num_sequences", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_table", c_void_p),
        ("block_size", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("slopes", c_void_p),
        ("left", c_int64),
        ("right", c_int64),
        ("tile_lists", POINTER(TileList)),
        ("tile_q", c_int64),
        ("threads", c_int64),
        ("scale_place", c_int64),
    )


def unavailable() -> str | None:
    """Return why the kernel cannot run here, or None; see `cpu_build.why_not` for what is looked at. Builds nothing."""
    return cpu_library.unavailable("attention")


def attention_forward(call: Call, dtype: torch.dtype, isa_name: str | None = None) -> None:
    """Run the kernel; it fills `call.out` and `call.lse`. Builds it first, where that has not been done.

    `call` must describe memory that is there and of `dtype`, one of DTYPES; nothing checks it. `isa_name` is the
    instruction set to use, `cpu_library.isa()` by default.

    Raises as `cpu_library.load_library`, and MemoryError when there is too little memory.
    """
    call.threads = cpu_library.threads()
    if cpu_library.load_library("attention", isa_name)[_FUNCTIONS[dtype]](byref(call)):
        raise MemoryError("The CPU attention kernel could not allocate its working memory.")


def load() -> None:
    """Load the kernel, building it first where that has not been done; raises as `cpu_library.load_library`."""
    cpu_library.load_library("attention")
