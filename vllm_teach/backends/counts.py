"""How often each backend was called, and for how long: the articles' metric of attention implementations."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Calls(NamedTuple):
    """Calls of one backend since the process began or `reset_calls`, and the seconds until they returned.

    On a GPU a call returns when its kernels are queued, so there the seconds are those of the processor.
    """

    calls: int
    seconds: float


_lock = threading.Lock()
_counts: dict[str, Calls] = {}


def record_call(backend: str, seconds: float) -> None:
    """Add one call of `backend`. May be called from several threads."""
    with _lock:
        before = _counts.get(backend, Calls(0, 0.0))
        _counts[backend] = Calls(before.calls + 1, before.seconds + seconds)


def calls() -> dict[str, Calls]:
    """Return, for each backend that `attend` or an engine has called, how often and for how long; a copy."""
    with _lock:
        return dict(_counts)


def reset_calls() -> None:
    """Begin counting anew."""
    with _lock:
        _counts.clear()
