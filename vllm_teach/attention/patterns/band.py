"""Patterns that are a band around the diagonal: two numbers, which a kernel compares instead of reading a mask."""

from __future__ import annotations

from vllm_teach.attention.patterns.base import Both, Pattern
from vllm_teach.attention.patterns.simple import Banded, Causal, LocalWindow

EVERYTHING = (-1, -1)


def as_band(pattern: Pattern | None) -> tuple[int, int] | None:
    """Return (left, right) such that a query sees just the keys from `left` before it to `right` after it, else None.

    -1 is no limit on that side, and None, no pattern at all, is (-1, -1). Goes by how the pattern is written: causal
    masks, windows, undilated bands, and what is made of them with `&`.
    """
    match pattern:
        case None:
            return EVERYTHING
        case Causal():
            return -1, 0
        case LocalWindow(left, right):
            return left, right
        case Banded(width, dilation) if dilation == 1 or width == 0:
            return width, width
        case Both(a, b):
            first, second = as_band(a), as_band(b)
            if first is None or second is None:
                return None
            return _nearer(first[0], second[0]), _nearer(first[1], second[1])
    return None


def _nearer(a: int, b: int) -> int:
    return max(a, b) if min(a, b) == -1 else min(a, b)
