"""Triton kernels, each with its specification in a few lines of PyTorch beside it.

They run on a CUDA device, or on the CPU in Triton's interpreter when TRITON_INTERPRET=1 is set before one of these
modules is imported (not in bfloat16, which the interpreter rounds towards zero). Importing one raises
MissingDependencyError where Triton is not installed.
"""

from vllm_teach.errors import MissingDependencyError, installs

try:
    import triton
except ImportError as error:
    raise MissingDependencyError(
        f"The package triton is not installed; on Linux, {installs('gpu')} installs it."
    ) from error

# Triton decides when it decorates a kernel, that is on import: setting the variable later changes nothing.
INTERPRETED = bool(triton.knobs.runtime.interpret)
