"""Triton for a notebook's own kernels: `triton, tl = interpreted_triton()`.

Without a GPU a kernel runs in Triton's interpreter, line by line in Python, on tensors of the CPU.
"""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_teach.errors import MissingDependencyError, VllmTeachError

_SWITCH = "TRITON_INTERPRET"


class Unstartable:
    """What `triton.jit` makes of a kernel where there is no Triton; `kernel[grid](…)` raises MissingDependencyError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Raise MissingDependencyError that says what to install."""
        raise MissingDependencyError(
            "Triton is not installed; on Linux pip install triton brings it. The rest of this lesson does without."
        )


def interpreted_triton() -> tuple[Any, Any]:
    """Return the modules (triton, triton.language) with the interpreter switched on for this process.

    Triton looks at the variable TRITON_INTERPRET when it is imported and when it decorates a kernel, so this sets it,
    for good, unless it is set already; whoever has a GPU sets it to 0 before Python starts. Where Triton is not
    installed (it is made for Linux), a kernel can still be written and read, and starting it raises
    MissingDependencyError. Raises VllmTeachError when Triton was imported before without its interpreter.
    """
    if sys.modules.get("triton") is not None and _SWITCH not in os.environ:
        raise VllmTeachError(
            "Triton was imported before its interpreter was switched on; restart, and call interpreted_triton first."
        )
    os.environ.setdefault(_SWITCH, "1")
    try:
        import triton
        import triton.language
    except ImportError:
        return SimpleNamespace(jit=Unstartable, next_power_of_2=_next_power_of_2), SimpleNamespace(constexpr=int)
    return triton, triton.language


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
