"""Building the CPU kernels on first use, once for each instruction set, and finding them again.

Each folder in `kernels/cpu/` becomes one shared library; the headers beside the folders are for all of them.
`torch.utils.cpp_extension` compiles the files, and the library is kept in the user's cache folder (or VLLM_TEACH_HOME)
under a name made of everything that went into it. As for models, a lock file makes a second process wait for the first,
and renaming makes the library appear whole or not at all. Its checksum lies beside it: to load a library that a full
disk has cut short kills the process.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from filelock import FileLock

from vllm_teach import resources
from vllm_teach.errors import MissingDependencyError

# The libraries, each named after its folder, and what serves where one cannot be had.
LIBRARIES = {
    "attention": "the backends sdpa and tiled need no compiler",
    "norms": "without it norms are computed in plain PyTorch",
    "matmul": "without it quantised weights are multiplied in plain PyTorch",
}
# What each instruction set needs to be told; "portable" is what every processor of the machine's kind has.
ISA_FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx512_bf16": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"),
}
# A product and a sum may become one instruction; no other freedom with floating-point numbers is taken. -w because
# GCC's own headers of AVX-512 warn.
_FLAGS = ("-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-w")

# Why a library cannot be had for an instruction set, found out in this process: it is not tried again.
_failures: dict[tuple[str, str], str] = {}


def why_not(library: str, isa: str) -> str | None:
    """Return why `library` cannot be had for `isa`, or None when it is there or nothing speaks against building it.

    `library` is one of LIBRARIES, `isa` one of ISA_FLAGS. Builds nothing. Where no library is there yet it asks the
    compiler (the environment variable CXX, else c++) to check one line, which takes a moment the first time, and looks
    for ninja.
    """
    if (library, isa) in _failures:
        return _failures[library, isa]
    kernel, otherwise = f"The CPU {library} kernel", LIBRARIES[library]
    try:
        if library_path(library, isa).exists():
            return None
    except ModuleNotFoundError as error:  # a bare machine, with little more than PyTorch
        return f"{kernel} has to be kept somewhere: pip install {error.name} or set VLLM_TEACH_HOME ({otherwise})."
    if sys.platform == "win32":
        return f"{kernel} is written for GCC and Clang, and PyTorch builds with another one on Windows ({otherwise})."
    problem = _compiler_problem(os.environ.get("CXX", "c++"), os.environ.get("PATH", ""))
    if problem is None and shutil.which("ninja", path=_search_path()) is None:
        problem = "ninja is not on the PATH: pip install ninja"
    return None if problem is None else f"{kernel} has to be built, and {problem} ({otherwise})."


def build(library: str, isa: str) -> Path:
    """Return the file of `library` for `isa`, building it first, with a line on stderr, where it is not there.

    Raises MissingDependencyError when it cannot be built. While it builds, PATH ends with this Python's own programs.
    """
    if (reason := why_not(library, isa)) is not None:
        raise MissingDependencyError(reason)
    path = library_path(library, isa)
    if not path.exists():
        try:
            _build(library, isa, path)
        # cpp_extension reports a failing compiler as a RuntimeError.
        except (OSError, RuntimeError, ImportError) as error:
            problem = f"The CPU {library} kernel could not be built ({_first_error(error)}); {LIBRARIES[library]}."
            raise MissingDependencyError(fail(library, isa, problem)) from error
    return path


def damage(path: Path) -> str | None:
    """Return what is wrong with the file of a built library, which must not be loaded then, or None."""
    try:
        intact = _checksum_file(path).read_text(encoding="ascii") == _checksum(path)
    except (OSError, UnicodeDecodeError):
        intact = False
    return None if intact else f"{path} is not what was built"


def fail(library: str, isa: str, reason: str) -> str:
    """Let `reason` be the answer of `why_not` from now on, and return it."""
    return _failures.setdefault((library, isa), reason)


def library_path(library: str, isa: str) -> Path:
    """Return where `library` is or will be for `isa`: a change of a source, a flag or PyTorch changes it."""
    return cache_folder() / f"{library}-{isa}-{_key(library, isa)}.so"


@lru_cache(maxsize=4 * len(LIBRARIES))
def _key(library: str, isa: str) -> str:
    return _hash_inputs(library, isa)


def _hash_inputs(library: str, isa: str) -> str:
    parts = [torch.__version__, platform.machine(), *_flags(isa)]
    parts += [f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in _files(library)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of built kernels: below the environment variable VLLM_TEACH_HOME, else the user's cache.

    Raises ModuleNotFoundError where platformdirs, which knows the user's cache, is needed and not installed.
    """
    home = os.environ.get("VLLM_TEACH_HOME")
    if not home:
        import platformdirs

        home = platformdirs.user_cache_dir("vllm_teach")
    return Path(os.path.expanduser(home)) / "kernels"


def _build(library: str, isa: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        for left_over in path.parent.glob(f"{glob.escape(path.stem)}.partial-*"):
            shutil.rmtree(left_over)
        if path.exists():
            return
        print(f"Building the CPU {library} kernel for {isa} (once, some 10 seconds) …", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}.partial-", dir=path.parent))
        try:
            compiled = _compile(library, isa, folder)
            if _hash_inputs(library, isa) != _key(library, isa):
                # Whoever finds the name would get another kernel than its sources say.
                raise OSError("a source was edited since this process began: start it again")
            (folder / "checksum").write_text(_checksum(compiled), encoding="ascii")
            os.replace(folder / "checksum", _checksum_file(path))
            os.replace(compiled, path)
        finally:
            # After Ctrl-C a compiler may still be writing there; the next build removes what is left.
            shutil.rmtree(folder, ignore_errors=True)


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _compile(library: str, isa: str, folder: Path) -> Path:
    """Compile the sources of `library` in `folder`; return the library there."""
    from torch.utils import cpp_extension

    with scripts_on_path():
        cpp_extension.load(
            name=f"vllm_teach_{library}_{isa}",
            sources=[str(file) for file in _files(library) if file.suffix == ".cpp"],
            extra_cflags=list(_flags(isa)),
            extra_ldflags=[flag for flag in _flags(isa) if flag == "-fopenmp"],
            build_directory=str(folder),
            is_python_module=False,
        )
    return next(folder.glob("*.so"))


def _flags(isa: str) -> tuple[str, ...]:
    # Apple's compiler has no OpenMP; the kernel then runs in one thread.
    return (*_FLAGS, *ISA_FLAGS[isa], *(() if sys.platform == "darwin" else ("-fopenmp",)))


def _files(library: str) -> list[Path]:
    """Return the library's own files and the headers that all share."""
    shared = resources.folder("kernels") / "cpu"
    return sorted(file for folder in (shared, shared / library) for file in folder.glob("*.[ch]*"))


@lru_cache(maxsize=8)
def _compiler_problem(compiler: str, path: str) -> str | None:
    """Return what is wrong with the compiler, found by letting it check one line of C++20."""
    if shutil.which(compiler, path=path) is None:  # PyTorch takes it for one program, too
        return (
            f"there is no C++ compiler {compiler!r} on the PATH: install g++, or name another one, without arguments, "
            "in the environment variable CXX"
        )
    try:
        arguments = ["-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
        subprocess.run(
            [compiler, *arguments], input=b"#include <vector>\n", capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler {compiler!r} fails on one line ({type(error).__name__})"
    return None


def _search_path() -> str:
    """Return the PATH with the folder behind it where pip puts programs: an environment need not be activated."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


@contextmanager
def scripts_on_path() -> Iterator[None]:
    """Let the PATH end with the folder where pip puts programs, ninja among them, for the length of a `with` block."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = _search_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _first_error(error: BaseException) -> str:
    """Return the compiler's first complaint, or else the first line of the error."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return next((line for line in lines if "error: " in line), lines[0])[:300].rstrip(".")
