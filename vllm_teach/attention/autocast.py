"""Mixed precision that stops at the door of functions which choose their precision themselves."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` run with autocast off: in a `torch.autocast` region float32 products are rounded to 16 bits.

    On CPUs and on CUDA GPUs; the region's state is back when the call ends.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Made anew for each call: an autocast object keeps the state that it brings back, and threads would share it.
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
