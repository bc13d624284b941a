"""A crowd that comes at once is let in a few at a time, so that it does not hold the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

# To read a request and queue it takes some 0.4 ms (a profile of 500 at once, on an AMD EPYC): 3 ms in a pass.
_EACH_PASS = 8


class Turns:
    """Lets a few through in each pass of the event loop; the others wait in the order they came.

    An event loop runs all that is ready before it looks at its connections again: what 500 requests need in one pass
    would keep every other client, and a load balancer that asks for `/health`, waiting for all of them.
    """

    def __init__(self, each_pass: int = _EACH_PASS) -> None:
        self._each_pass = self._left = each_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def wait(self) -> None:
        """Return when it is this caller's turn: at once, unless many come."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._begin_pass, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._each_pass
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a caller that was cancelled has gone
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < self._each_pass
        if self._counting:
            loop.call_soon(self._begin_pass, loop)


class InTurn:
    """ASGI middleware: requests with a body, which is read already, begin in `Turns`; the others at once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._turns = app, Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on to the app."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.wait()
        await self.app(scope, receive, send)
