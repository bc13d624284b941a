"""Connections that send half a request and then nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vllm_teach.serving.http.http_errors import ApiError, describe_error


def protocol_with(header_timeout: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's HTTP protocol, which closes a connection whose request has no end of its headers in time.

    Uvicorn itself waits for ever. The time runs from when the connection is made, or from a further request's first
    byte. What is no HTTP is answered with OpenAI's error object, like everything else.
    """

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_headers()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._deadline is None:
                self._expect_headers()

        def on_headers_complete(self) -> None:
            self._have_headers()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_headers()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._have_headers()
            body = describe_error(ApiError("this is no valid HTTP request: correct it.")).body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[400] + head + body)
            self.transport.close()

        def _expect_headers(self) -> None:
            self._deadline = self.loop.call_later(header_timeout, self._give_up)

        def _have_headers(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            transport: Any = self.transport
            if not transport.is_closing():
                transport.close()

    return Protocol
