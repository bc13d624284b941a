"""What a benchmark lists of a kernel that should run here and does not, and what is a fault, which shows."""

from __future__ import annotations

import subprocess
import sys

from vllm_teach.engine.failure import is_out_of_memory
from vllm_teach.errors import MissingDependencyError

# A failing pass of Triton's compiler, and machine code for other GPUs, are plain RuntimeErrors.
_NOT_COMPILED = ("PassManager::run failed", "no kernel image is available")


def why_failed(error: Exception) -> str | None:
    """Return as a sentence why a kernel's call failed: not built, not compiled, out of memory; None for all else."""
    if not (isinstance(error, MissingDependencyError) or is_out_of_memory(error) or _not_compiled(error)):
        return None
    words = str(error).strip().partition("\n")[0].removesuffix(".")
    return f"It failed: {words or type(error).__name__}."


def _not_compiled(error: Exception) -> bool:
    if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NOT_COMPILED):
        return True
    if "triton" not in sys.modules:
        return False
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    # The last is of the C compiler, with which Triton builds what starts its kernels.
    return isinstance(error, CompilationError | OutOfResources | PTXASError | subprocess.CalledProcessError)
