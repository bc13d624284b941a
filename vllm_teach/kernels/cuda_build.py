"""Building the CUDA kernels on first use, where there is a GPU, and finding them again.

`torch.utils.cpp_extension` compiles `kernels/cuda/layer_norm.cu` into a shared library for the GPUs of this machine. It
is kept beside the CPU kernels, under a name made of everything that went into it, and appears there whole or not at
all. What the compiler makes of the source can be seen without a GPU: see `cuda_compiler`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from filelock import FileLock

from vllm_teach import kernels
from vllm_teach.errors import MissingDependencyError
from vllm_teach.kernels import cpu_build, cuda_compiler

SOURCE = "cuda/layer_norm.cu"
_FLAGS = ("-O3",)

# Why the library cannot be had, found out in this process: it is not tried again.
_failures: list[str] = []


def why_not() -> str | None:
    """Return why the CUDA kernels cannot be had here, or None when nothing speaks against it. Builds nothing."""
    if _failures:
        return _failures[0]
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} was built without CUDA; install one of its CUDA builds to run CUDA kernels."
        )
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device; CUDA kernels run on an NVIDIA GPU alone."
    if library_path().exists():
        return None
    if (reason := cuda_compiler.why_not()) is not None:
        return reason
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        return "PyTorch finds no CUDA toolkit to build with; install one and name its folder in CUDA_HOME."
    return None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Return the library of the CUDA kernels, building it first, with a line on stderr, where it is not there.

    Raises MissingDependencyError when it cannot be built or loaded.
    """
    if (reason := why_not()) is not None:
        raise MissingDependencyError(reason)
    path = library_path()
    try:
        if not path.exists():
            _build(path)
        return ctypes.CDLL(str(path))
    # cpp_extension reports a failing compiler as a RuntimeError.
    except (OSError, RuntimeError, ImportError) as error:
        _failures.append(f"The CUDA kernels could not be built and loaded ({cuda_compiler.first_error(str(error))}).")
        raise MissingDependencyError(_failures[0]) from error


def library_path() -> Path:
    """Return where the library is or will be: a change of the source, PyTorch or the machine's GPUs changes it.

    So does the environment variable TORCH_CUDA_ARCH_LIST, by which PyTorch compiles for other GPUs than these.
    """
    devices = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    parts = [torch.__version__, str(torch.version.cuda), str(sorted(devices)), wanted, *_FLAGS, kernels.source(SOURCE)]
    return cpu_build.cache_folder() / f"cuda-norms-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def _build(path: Path) -> None:
    from torch.utils import cpp_extension

    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(path.with_suffix(".lock")),
        tempfile.TemporaryDirectory(prefix=f"{path.stem}.partial-", dir=path.parent) as name,
        cpu_build.scripts_on_path(),
    ):
        if path.exists():
            return
        print("Building the CUDA norm kernels (once, up to a minute) …", file=sys.stderr, flush=True)
        folder = Path(name)
        (folder / "norms.cu").write_text(kernels.source(SOURCE), encoding="utf-8")
        cpp_extension.load(
            name="vllm_teach_cuda_norms",
            sources=[str(folder / "norms.cu")],
            extra_cuda_cflags=list(_FLAGS),
            build_directory=name,
            is_python_module=False,
        )
        os.replace(next(folder.glob("*.so")), path)
