"""What a caller holds of a request in flight: its answer, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from vllm_teach.engine.prompts import TokensPrompt
from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.serving.async_engine.deltas import merge
from vllm_teach.serving.async_engine.messages import RequestDelta
from vllm_teach.serving.async_engine.portable_errors import renewed


class OpenRequest:
    """A request in flight, as the engine's side knows it: what its reader has not taken yet, and how it ended.

    Lives in the event loop's thread. `ended`: nothing more is to come for the reader, and what the engine still says is
    dropped. `error` is how it failed.
    """

    def __init__(self, request_id: str, prompt: TokensPrompt) -> None:
        self.request_id, self.prompt = request_id, prompt
        self.unread: list[RequestDelta] = []
        self.ended = False
        self.error: VllmTeachError | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.reader: asyncio.Future[None] | None = None

    def put(self, delta: RequestDelta) -> None:
        """Give the reader something; the last delta ends the request."""
        if self.ended:
            return
        if delta.error is not None:
            self.fail(delta.error)
            return
        self.unread.append(delta)
        if delta.finished:
            self._end()
        self._wake()

    def fail(self, error: VllmTeachError) -> None:
        """End the request with `error`, which the reader gets when it has read what is there."""
        if not self.ended:
            self.error = error
            self._end()
            self._wake()

    def close(self) -> None:
        """End the request, as its reader wants nothing more."""
        self.unread.clear()
        self._end()
        self._wake()

    def _end(self) -> None:
        self.ended = True
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def _wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class RequestStream:
    """An async iterator over what is new of one request, made by `AsyncLLMEngine.submit`; one task reads it.

    Each delta has what came since the one before: a reader that is slow gets several steps in one. The first may have
    no completions; it says that the request left the queue. After the one with `finished` the iteration ends; a request
    that fails raises its typed error instead (EngineError, RequestTimeoutError, EngineDeadError), once what came before
    has been read.

    Whoever stops early calls `aclose`, or leaves `async with`; a stream that is dropped is aborted when the garbage
    collector finds it. A reader that is cancelled may go on reading.
    """

    def __init__(
        self, request: OpenRequest, close: Callable[[OpenRequest], None], drop: Callable[[OpenRequest], None]
    ) -> None:
        """`close` aborts the request in the event loop's thread, `drop` does from any thread."""
        self._request, self._close, self._drop = request, close, drop
        self._exhausted = False

    @property
    def request_id(self) -> str:
        """The request's name, unique among those in flight."""
        return self._request.request_id

    @property
    def prompt(self) -> TokensPrompt:
        """The prompt as it is computed: its token ids, and its text if it came as one."""
        return self._request.prompt

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        request = self._request
        if request.reader is not None:
            raise InvalidArgumentError(
                f"request {request.request_id!r} is being read by another task: let one task read."
            )
        while not request.unread and not request.ended:
            request.reader = asyncio.get_running_loop().create_future()
            try:
                await request.reader
            finally:
                request.reader = None
        if request.unread:
            unread, request.unread = request.unread, []
            return merge(unread)
        if request.error is not None and not self._exhausted:
            self._exhausted = True
            raise renewed(request.error)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and end the iteration. Waits for nothing; can be called twice."""
        self._exhausted = True
        self._close(self._request)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._request.ended:
            self._drop(self._request)
