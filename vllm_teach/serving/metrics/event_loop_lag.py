"""How late an event loop is: whatever runs in it for long holds up every connection.

A task asks to be woken at every tick of a grid. Each tick that passed is told with how late it was seen, so that one
stall of a second counts as the ten tenths that a client could have met, and a p99 is one of time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def watch_event_loop(observe: Callable[[float], None], interval: float = 0.1) -> AsyncIterator[None]:
    """While the `async with` block is open, tell `observe` every `interval` seconds how late this event loop woke up.

    For an app's lifespan: `async with watch_event_loop(metrics.on_event_loop_lag): yield`. What `observe` raises ends
    the watch and is raised when the block ends.
    """
    task = asyncio.create_task(_measure(observe, interval), name="event-loop lag")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def _measure(observe: Callable[[float], None], interval: float) -> None:
    clock = asyncio.get_running_loop().time
    due = clock() + interval
    while True:
        await asyncio.sleep(due - clock())
        now = clock()
        while due <= now:
            observe(now - due)
            due += interval
