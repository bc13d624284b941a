"""Work that would hold up the event loop goes to a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

T = TypeVar("T")

# Characters or ids that take less than a thread's start and end, which is some 0.1 ms.
_AT_ONCE = 2048
# What takes up to some 0.1 s; a megabyte takes seconds, and may not hold up the many that take milliseconds.
_LONG = 1 << 16
# Each thread that works takes the interpreter's lock from the event loop, some for a tenth of a second.
_lanes: RunVar[tuple[CapacityLimiter, CapacityLimiter]] = RunVar("threads beside the loop")


async def beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns; it runs in a thread if it is about more than a few of `size` characters or ids.

    Works of many wait for each other, and those of middling length for all but one of their kind.
    """
    if size <= _AT_ONCE:
        return work()
    middling, long = _get_lanes()
    limiter = middling if size <= _LONG else long
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)


def _get_lanes() -> tuple[CapacityLimiter, CapacityLimiter]:
    """Return who may work at once in this event loop: two works of middling length, and a long one."""
    lanes = _lanes.get(None)
    if lanes is None:
        lanes = CapacityLimiter(2), CapacityLimiter(1)
        _lanes.set(lanes)
    return lanes
