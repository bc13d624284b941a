"""Notices that an engine with work to do says nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HangWatch:
    """Calls `on_hang` when `count` stays the same for `timeout` seconds between `start` and `stop`.

    It looks twice in that time and wants silence both times: when the whole machine slept, or the event loop itself was
    held up, one look comes late, and before what the engine said meanwhile.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        count: Callable[[], int],
        on_hang: Callable[[], None],
    ) -> None:
        self._loop, self._interval, self._count, self._on_hang = loop, timeout / 2, count, on_hang
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0
        self._silent_looks = 0

    def start(self) -> None:
        """Begin to watch, unless it does already."""
        if self._timer is None:
            self._last, self._silent_looks = self._count(), 0
            self._timer = self._loop.call_later(self._interval, self._look)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        count = self._count()
        self._silent_looks = self._silent_looks + 1 if count == self._last else 0
        self._last = count
        if self._silent_looks == 2:
            self._timer = None
            self._on_hang()
        else:
            self._timer = self._loop.call_later(self._interval, self._look)
