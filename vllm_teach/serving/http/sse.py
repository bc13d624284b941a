"""Server-sent events: how a stream goes out.

An event is `data: ` and one line of JSON, then an empty line. The last one is `data: [DONE]`, and says that the answer
is whole: after an error, which is an event {"error": {...}}, it does not come. A stream that ends with neither was cut.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_teach.serving.http.disconnect import unless_disconnected

DONE = b"data: [DONE]\n\n"
# What the description of a route says of it.
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
DESCRIBED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}}
# Only CR and LF end a line of an event. Many a client splits at these, too, which JSON need not write as they are.
_LINE_ENDS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\u0085\u2028\u2029"}


def event(data: bytes) -> bytes:
    """Return `data`, JSON in UTF-8 on one line, as an event."""
    for mark, escaped in _LINE_ENDS.items():
        data = data.replace(mark, escaped)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """A response that sends `events` as they come, and calls `close` at its end, however it ends.

    When the client goes away `events` is cancelled where it waits, at once and not when it next has something to send.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        self.status_code, self.background = 200, None
        self._events, self._close = events, close
        # nginx collects an answer before it passes it on, unless it is told not to.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnect:
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for some in self._events:
            await send({"type": "http.response.body", "body": some, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
