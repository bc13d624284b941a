"""Connections that send half a request and then nothing, headers without end, or what is no HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vllm_teach.serving.http.http_errors import ApiError, describe_error

# Of one request's headers, or of what else may come with a body, as trailers do.
MOST_HEADER_BYTES = 1 << 16


def protocol_with(header_timeout: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's HTTP protocol with a limit on headers, in seconds and in bytes; uvicorn itself has neither.

    The time runs from when the connection is made, or from a further request's first byte; then the connection is
    closed. What is too large, or no HTTP, is answered with OpenAI's error object, like everything else.
    """

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _num_bytes = 0  # what came since the last headers, piece of a body or end of a request

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if self._num_bytes > MOST_HEADER_BYTES:
                message = f"the headers have more than {MOST_HEADER_BYTES} bytes: send fewer."
                self._refuse(ApiError(message, 431, code="headers_too_large"))
                return
            self._num_bytes += len(data)
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._deadline is None:
                self._expect_headers()

        def on_headers_complete(self) -> None:
            self._num_bytes = 0
            self._have_headers()
            super().on_headers_complete()
            if self.parser.should_upgrade():  # to what nobody speaks here; the parser reads no further request
                self.cycle.keep_alive = False

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_bytes = 0
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_headers()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError("this is no valid HTTP request: correct it."))

        def _refuse(self, error: ApiError) -> None:
            """Answer what was read last, and close; while an earlier request is being answered, close after that."""
            self._have_headers()
            if self.transport.is_closing():
                return
            earlier = self.cycle is not None and not self.cycle.response_complete
            if earlier and (self.cycle.response_started or not self.cycle.more_body or self.pipeline):
                self.cycle.keep_alive = False
                return
            failure = describe_error(error)
            body = failure.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[failure.status] + head + body)
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
