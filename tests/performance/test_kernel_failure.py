"""Which failures of a kernel are a machine's, and which are a fault of its own."""

import subprocess

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance.kernel_failure import why_failed


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MissingDependencyError("There is no compiler."), "It failed: There is no compiler."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "It failed: CUDA out of memory. Tried."),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "It failed: DefaultCPUAllocator: can't allocate memory.",
        ),
        (MemoryError(), "It failed: MemoryError."),
        (RuntimeError("PassManager::run failed"), "It failed: PassManager::run failed."),
        (
            RuntimeError("CUDA error: no kernel image is available"),
            "It failed: CUDA error: no kernel image is available.",
        ),
    ],
)
def test_what_a_machine_lacks_is_a_reason(error: Exception, reason: str) -> None:
    assert why_failed(error) == reason


def test_what_triton_cannot_compile_is_a_reason() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    assert (why_failed(errors.OutOfResources(300, 200, "shared memory")) or "").startswith("It failed: out of resource")
    assert why_failed(errors.PTXASError("no such instruction")) is not None
    assert why_failed(subprocess.CalledProcessError(1, ["gcc"])) is not None
    assert why_failed(errors.InterpreterError("index")) is None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("The size of tensor a must match"), InvalidArgumentError("x is 3."), KeyError("x"), OSError()],
)
def test_a_bug_is_none(error: Exception) -> None:
    assert why_failed(error) is None
