"""The CPU attention kernel as a Python function: which instruction set it uses here, and the call itself.

The library knows nothing of PyTorch: it gets pointers, sizes and strides (`kernels/cpu/call.h`) through ctypes, which
releases Python's lock meanwhile. Nothing is checked here; `vllm_teach.backends.cpu` checks.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_build

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

# Holds something in a forked child: it has none of its parent's threads, and OpenMP would wait for them for ever.
_forked: list[bool] = []
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


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
    )


@lru_cache(maxsize=1)
def isa() -> str:
    """Return the instruction set that is used here: "avx512_bf16", "avx512", "avx2" or "portable".

    The best that the processor has, but none above what PyTorch uses, which the environment variable
    ATEN_CPU_CAPABILITY lowers to "avx2" or "default".
    """
    allowed = {"AVX512": ("avx512_bf16", "avx512", "avx2"), "AVX2": ("avx2",)}
    wanted = allowed.get(torch.backends.cpu.get_cpu_capability(), ())
    return next((name for name in wanted if name in runnable_isas()), "portable")


@lru_cache(maxsize=1)
def runnable_isas() -> tuple[str, ...]:
    """Return the instruction sets that this processor has, the most basic first.

    Linux lists a processor's features; elsewhere, what PyTorch says of it is believed.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        words = next((line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), [])
        features = {f"-m{word.replace('avx512_bf16', 'avx512bf16')}" for word in words}
        return tuple(name for name, flags in cpu_build.ISA_FLAGS.items() if features.issuperset(flags))
    known = {"AVX2": ("portable", "avx2"), "AVX512": ("portable", "avx2", "avx512")}
    return known.get(torch.backends.cpu.get_cpu_capability(), ("portable",))


def unavailable() -> str | None:
    """Return why the kernel cannot run here, or None; see `cpu_build.why_not` for what is looked at. Builds nothing."""
    return cpu_build.why_not(isa())


def attention_forward(call: Call, dtype: torch.dtype, isa_name: str | None = None) -> None:
    """Run the kernel; it fills `call.out` and `call.lse`. Builds it first, where that has not been done.

    `call` must describe memory that is there and of `dtype`, one of DTYPES; nothing checks it. `isa_name` is the
    instruction set to use, `isa()` by default. A forked child runs it in one thread.

    Raises MissingDependencyError when the kernel cannot be built or loaded, InvalidArgumentError for an instruction set
    that this processor has not, and MemoryError when there is too little memory.
    """
    if _forked:
        call.threads = 1
    if _library(isa_name or isa())[_FUNCTIONS[dtype]](byref(call)):
        raise MemoryError("The CPU attention kernel could not allocate its working memory.")


def load(isa_name: str | None = None) -> None:
    """Load the kernel, building it first where that has not been done; raises as `attention_forward`."""
    _library(isa_name or isa())


@lru_cache(maxsize=4)
def _library(isa_name: str) -> ctypes.CDLL:
    if isa_name not in runnable_isas():
        raise InvalidArgumentError(f"isa is {isa_name!r}; this processor can run {', '.join(runnable_isas())}.")
    path = cpu_build.build(isa_name)
    problem: str | OSError | None = cpu_build.damage(path)
    if problem is None:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = error
    reason = f"The CPU kernel cannot be loaded ({problem}): delete that file, and it is built again."
    raise MissingDependencyError(cpu_build.fail(isa_name, reason))
