"""A CPU kernel's library in this process: which instruction set it is used for here, and loading it.

The libraries know nothing of PyTorch: they get pointers, sizes and strides through ctypes, which releases Python's lock
meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_build

# Holds something in a forked child: it has none of its parent's threads, and OpenMP would wait for them for ever.
_forked: list[bool] = []
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


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


def unavailable(library: str) -> str | None:
    """Return why `library` cannot be used here, or None; see `cpu_build.why_not`. Builds nothing."""
    return cpu_build.why_not(library, isa())


def threads() -> int:
    """Return in how many threads a kernel may run: PyTorch's number, but one in a forked child."""
    return 1 if _forked else torch.get_num_threads()


@lru_cache(maxsize=16)
def load_library(library: str, isa_name: str | None = None) -> ctypes.CDLL:
    """Return `library`, one of `cpu_build.LIBRARIES`, for `isa_name`, `isa()` by default; build it where it is missing.

    Raises MissingDependencyError when it cannot be built or loaded, and InvalidArgumentError for an instruction set
    that this processor has not.
    """
    isa_name = isa_name or isa()
    if isa_name not in runnable_isas():
        raise InvalidArgumentError(f"isa is {isa_name!r}; this processor can run {', '.join(runnable_isas())}.")
    path = cpu_build.build(library, isa_name)
    problem: str | OSError | None = cpu_build.damage(path)
    if problem is None:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = error
    reason = f"The CPU {library} kernel cannot be loaded ({problem}): delete that file, and it is built again."
    raise MissingDependencyError(cpu_build.fail(library, isa_name, reason))
