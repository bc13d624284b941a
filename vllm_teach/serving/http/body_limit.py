"""Reads a request's body before the app does: not too much of it, and not for too long."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_teach.serving.http.http_errors import NO_RETRY, ApiError, describe_error
from vllm_teach.serving.http.service import Service

# A client that is still sending does not read; when its connection is closed it often sees only that. So what is too
# much is read to its end, up to this multiple of the limit, and thrown away.
_READ_ON = 16


class BodyLimit:
    """ASGI middleware that hands the app a whole body at once, and answers 413 to a large one and 408 to a slow one.

    A client that sends a byte a minute holds a connection and a few bytes of memory for `body_timeout` seconds, and
    nothing else: it comes neither to the app nor to the engine.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.limit, self.timeout = service.settings.max_body_bytes, service.settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on to the app."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.timeout):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            await self._refuse(self._too_slow(), scope, receive, send)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None if the client went away. Raises ApiError for one that is too large."""
        length = headers.get("content-length", "")
        declared = int(length) if length.isdecimal() and len(length) < 20 else 0  # others count as they come
        # Who asks with "Expect: 100-continue" has not sent it yet, and does not when the answer is no.
        if declared > self.limit * _READ_ON or (declared > self.limit and "expect" in headers):
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            size += len(message.get("body", b""))
            if size <= self.limit:
                parts.append(message.get("body", b""))
            else:
                parts.clear()
            if size > self.limit * _READ_ON or (size > self.limit and not message.get("more_body", False)):
                raise self._too_large()
            if not message.get("more_body", False):
                if declared and not size:
                    raise ApiError("the body is lost with the header 'Upgrade', which is not followed here: omit it.")
                return b"".join(parts)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.count_error(error)
        await describe_error(error).response()(scope, receive, send)

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self.limit} bytes: send less at once."
        return ApiError(message, 413, code="body_too_large", headers={"connection": "close"})

    def _too_slow(self) -> ApiError:
        return ApiError(
            f"the body was not there after {self.timeout:g} s: send it faster.",
            408,
            code="request_timeout",
            type="timeout_error",
            headers={"connection": "close", **NO_RETRY},
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what brings `body` first, and then what `receive` brings: the news that the client went away."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
