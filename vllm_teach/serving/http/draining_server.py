"""Uvicorn's server, which told to end lets what is in flight finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

# After the drain, for what was ended to say so.
_LAST_WORDS = 5.0


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which told to end takes no more connections and waits for those that have a request.

    After `drain_timeout` seconds the engine is stopped, so that what is left ends in an error that says so, and not in
    a cut connection. Uvicorn would then raise the signal once more and die of it; this one returns. `report` is told, a
    sentence each time, how many requests its end waits for, and how many it did not wait for.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncLLMEngine,
        drain_timeout: float,
        on_serving: Callable[[DrainingServer], None] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(config)
        self.engine, self.drain_timeout, self.on_serving, self.report = engine, drain_timeout, on_serving, report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_once = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises InvalidArgumentError when another process began to listen there meanwhile."""
        self._loop = asyncio.get_running_loop()
        for sock in sockets or []:
            _listen(sock, self.config.backlog)
        await super().startup(sockets)
        if self.on_serving is not None:
            self.on_serving(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain."""
        if self.drain_timeout > 0:
            self._say("finishing {requests} (at most {seconds:g} s); Ctrl-C or SIGTERM again stops at once.")
        ending = asyncio.create_task(self._end_the_late())
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # then uvicorn leaves the app's own ending out
                await self.lifespan.shutdown()
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_the_late(self) -> None:
        told = await self._told_within(self.drain_timeout)
        self._say("stopping without finishing {requests}.")
        if not told:
            await self.engine.stop()
            await self._told_within(_LAST_WORDS)
        # Some do not even read their error, and from Python 3.12 on a closed server waits for its connections.
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _say(self, sentence: str) -> None:
        """Report a sentence on the requests in flight, if there are any."""
        count = len(self.server_state.tasks)
        if count and self.report is not None:
            requests = "1 request" if count == 1 else f"{count} requests"
            self.report(sentence.format(requests=requests, seconds=self.drain_timeout))

    async def _told_within(self, seconds: float) -> bool:
        """Wait for a second signal; return whether it came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._at_once.wait()
        return self._at_once.is_set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let `handle_exit` have the signals meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """End: the first time in good order, the second time at once. Can be called in any thread."""
        if self.should_exit and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._at_once.set)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, as a signal says."""
        self.end()


def _listen(sock: socket.socket, backlog: int) -> None:
    # Here, as uvloop says nothing of a socket that cannot: it just closes it.
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(backlog)
    except OSError as error:
        reason = error.strerror or error
        message = f"port={port} of host={host!r} cannot be served on ({reason}): choose another one."
        raise InvalidArgumentError(message) from error
