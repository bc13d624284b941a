"""Triton for a notebook's own kernels: `from vllm_teach.teaching.interpreter import tl, triton`.

Without a GPU a kernel runs in Triton's interpreter, line by line in Python, on tensors of the CPU. Triton asks for it
when it decorates a kernel, so the switch has to be set before: importing this module sets TRITON_INTERPRET=1, unless
the variable is there already. Where Triton is not installed (it is made for Linux), a kernel can still be written and
read, and starting it says what is missing.
"""

import os
from types import SimpleNamespace
from typing import Any

from vllm_teach.errors import MissingDependencyError

os.environ.setdefault("TRITON_INTERPRET", "1")


class Unstartable:
    """What `triton.jit` makes of a kernel where there is no Triton; `kernel[grid](…)` raises MissingDependencyError."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Any:
        raise MissingDependencyError(
            "Triton is not installed; on Linux pip install triton brings it. The rest of this lesson does without."
        )


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = SimpleNamespace(jit=Unstartable, next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    tl = SimpleNamespace(constexpr=int)
