"""NVIDIA's compiler without a GPU: where nvcc is, and what it reports of a kernel (registers, spills, shared memory).

ptxas, its last stage, allots the registers and says how many: `nvcc -Xptxas -v`. A multiprocessor has 65,536 of them,
so fewer registers a thread are more threads that can be there at once, and a kernel that needs more than it may have
spills the rest into memory. Neither needs a device to be seen.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError

_INSTALL = "install a CUDA toolkit, or on Linux pip install 'cuda-toolkit[cccl,nvcc]==13.0.*', which needs no GPU"
_SECONDS = 300  # for one run of the compiler


@dataclass(frozen=True)
class KernelReport:
    """What the compiler allotted to one kernel on one architecture: registers for each thread, and bytes.

    `shared_bytes` are the fixed ones of a thread block; what a launch asks for comes on top.
    """

    name: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        """Whether registers are kept in memory for want of room."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def compile_report(code: str, arch: str = "sm_80") -> list[KernelReport]:
    """Compile CUDA `code` for `arch` and return what each kernel in it needs, in the order of their names.

    `code` is a source text such as `kernels.source("cuda/layer_norm.cu")`; it may include CUDA's headers and the C++
    library. Takes seconds. Raises InvalidArgumentError for an architecture that the compiler does not know and for code
    that does not compile, with its first complaint, and MissingDependencyError where `why_not` has a reason.
    """
    _, printed = _compile(code, arch, "-cubin", "-Xptxas", "-v")
    return sorted(parse_report(printed), key=lambda report: report.name)


def compile_ptx(code: str, arch: str = "sm_80") -> str:
    """Return the PTX, NVIDIA's portable assembly, that `code` becomes for `arch`. Raises as `compile_report`."""
    return _compile(code, arch, "-ptx")[0].decode()


def _compile(code: str, arch: str, *flags: str) -> tuple[bytes, str]:
    """Return (what nvcc makes of `code`, what it prints)."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise InvalidArgumentError(f"arch is {arch!r}; give one such as 'sm_80' (A100) or 'sm_90' (H100).")
    with tempfile.TemporaryDirectory(prefix="vllm-teach-nvcc-") as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(code, encoding="utf-8")
        run = run_nvcc([*flags, f"-arch={arch}", "-std=c++17", "-o", "made", "kernel.cu"], folder)
        printed = run.stdout + run.stderr
        if run.returncode != 0:
            raise InvalidArgumentError(f"code does not compile for {arch}: {first_error(printed)}.")
        return (folder / "made").read_bytes(), printed


def parse_report(text: str) -> Iterator[KernelReport]:
    """Yield a `KernelReport` for each kernel in what `-Xptxas -v` printed; names become readable.

    Raises InvalidArgumentError for a kernel of which `text` does not tell all.
    """
    for block in re.split(r"Compiling entry function '", text)[1:]:
        name, arch = re.findall(r"[^']+", block)[0:3:2]
        # A device function that was not inlined has properties, too: the kernel's stand under its own name.
        stack = re.search(rf"properties for {re.escape(name)}\s+(\d+) bytes stack frame", block)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", block[stack.end() :] if stack else "")
        registers = re.search(r"Used (\d+) registers", block)
        if stack is None or spills is None or registers is None:
            raise InvalidArgumentError(f"text does not tell all about the kernel {name}.")
        shared = re.search(r"(\d+) bytes smem", block)  # left out where there is none
        yield KernelReport(
            name=demangle(name),
            arch=arch,
            registers=int(registers[1]),
            spill_store_bytes=int(spills[1]),
            spill_load_bytes=int(spills[2]),
            stack_bytes=int(stack[1]),
            shared_bytes=int(shared[1]) if shared else 0,
        )


def why_not() -> str | None:
    """Return why nothing can be compiled here, or None: nvcc that runs, and the C++ compiler that it calls."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return (
            f"nvcc leaves the C++ in a file to a C++ compiler, and there is no {compiler!r} on the PATH: install g++, "
            "or name another one in the environment variable CXX."
        )
    if find_nvcc() is None:
        return f"No nvcc that runs was found by CUDA_HOME, on the PATH or among Python's packages: {_INSTALL}."
    return None


def find_nvcc() -> Path | None:
    """Return the nvcc that is used: CUDA_HOME's, else the PATH's, else that of the package nvidia-cuda-nvcc, or None.

    One that does not tell its version, as a script does whose toolkit is gone, is passed over.
    """
    return _find_nvcc(os.environ.get("CUDA_HOME"), os.environ.get("PATH", os.defpath))


@lru_cache(maxsize=8)
def _find_nvcc(cuda_home: str | None, path: str) -> Path | None:
    candidates = [Path(cuda_home) / "bin" / "nvcc" if cuda_home else None, shutil.which("nvcc", path=path), _packaged()]
    return next((Path(each) for each in candidates if each is not None and nvcc_version(Path(each))), None)


def nvcc_version(nvcc: Path) -> str | None:
    """Return the release of CUDA that the compiler `nvcc` belongs to, such as "13.0", or None when it does not run."""
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", run.stdout)
    return release[1] if release else None


def run_nvcc(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run nvcc in `folder`. Raises MissingDependencyError where `why_not` has a reason, or nvcc does not come back."""
    if (reason := why_not()) is not None:
        raise MissingDependencyError(reason)
    command = [str(find_nvcc()), "-ccbin", str(shutil.which(os.environ.get("CXX", "c++"))), *arguments]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(f"nvcc did not do its work ({type(error).__name__}): {_INSTALL}.") from error


def demangle(name: str) -> str:
    """Return a C++ name as it was written, without namespaces, arguments and result: "kernel<__half, 8>".

    A name that C++ did not mangle stays what it is.
    """
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    text = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return re.sub(r"\(.*\)$", "", text.replace("(anonymous namespace)::", "").removeprefix("void "))


def _packaged() -> Path | None:
    try:
        files = metadata.files("nvidia-cuda-nvcc") or ()
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvcc"), None)


def first_error(text: str) -> str:
    """Return a compiler's first complaint in what it printed, or else its first line, without the full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no word of why"]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[0])[:300].rstrip(".")
