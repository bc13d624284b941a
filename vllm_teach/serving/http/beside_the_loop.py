"""Work that would hold up the event loop goes to a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")

# Characters or ids that take less than a thread's start and end, which is some 0.1 ms.
_AT_ONCE = 2048


async def beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns; it runs in a thread if it is about more than a few of `size` characters or ids."""
    return work() if size <= _AT_ONCE else await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
