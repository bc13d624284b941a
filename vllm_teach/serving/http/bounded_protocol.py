"""Connections that send half a request, headers without end, or what is no HTTP, or that do not read their answers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vllm_teach.serving.http.http_errors import ApiError, describe_error

# Of one request's headers, or of what else may come with a body, as trailers do.
MOST_HEADER_BYTES = 1 << 16
# Requests that a client sends before it has its answers: uvicorn would keep all that come.
MOST_AHEAD = 128


def protocol_with(header_timeout: float, send_timeout: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's HTTP protocol with limits on headers, in seconds and bytes, and more; uvicorn itself has none.

    The time runs from when the connection is made, or from the first byte behind an answer; then the connection is
    closed. What is too large, or no HTTP, is answered with OpenAI's error object, like everything else. One whose
    client takes nothing of what waits to be sent for `send_timeout` seconds is cut. After `MOST_AHEAD` requests ahead
    of their answers no further one is read.
    """

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None  # while the client has to read before more can be sent
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
            # Uvicorn has just stopped the clock of a connection between two requests, whatever came.
            answered = self.cycle is None or self.cycle.response_complete
            if answered and self._deadline is None and not self.transport.is_closing():
                self._expect_headers()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._deadline is None:
                self._expect_headers()

        def on_headers_complete(self) -> None:
            self._num_bytes = 0
            self._have_headers()
            if len(self.pipeline) == MOST_AHEAD:
                raise ValueError(f"more than {MOST_AHEAD} requests ahead")  # which ends the parsing
            super().on_headers_complete()
            if self.parser.should_upgrade():  # to what nobody speaks here; the parser reads no further request
                self.cycle.keep_alive = False

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_bytes = 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.pipeline:
                self.flow.pause_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(send_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_waiting_for_reader()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_headers()
            self._stop_waiting_for_reader()
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

        def _stop_waiting_for_reader(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _give_up(self) -> None:
            self._deadline = None
            transport: Any = self.transport
            if not transport.is_closing():
                transport.close()

    return Protocol
