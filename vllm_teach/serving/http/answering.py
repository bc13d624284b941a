"""A generation as an HTTP answer: whole, or as a stream, in whatever form a route's writer gives it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.async_engine.messages import CompletionDelta
from vllm_teach.serving.http.disconnect import unless_disconnected
from vllm_teach.serving.http.generation import Generation
from vllm_teach.serving.http.http_errors import describe_error
from vllm_teach.serving.http.sse import DONE, EventStream, event

logger = logging.getLogger(__name__)


class AnswerWriter(Protocol):
    """Writes what a generation brings, piece by piece or once, as bodies of one API."""

    def chunks(self, number: int, new: CompletionDelta) -> Iterator[BaseModel]:
        """Yield the events for what is new of a completion of prompt `number`; none where a client sees nothing."""
        ...

    def last_chunks(self) -> Iterator[BaseModel]:
        """Yield the events after the last completion's end."""
        ...

    def whole(self) -> BaseModel:
        """Return the whole answer."""
        ...


async def answer(request: Request, generation: Generation, writer: AnswerWriter, stream: bool) -> Response:
    """Return the answer; when the client goes away before its end, also of one that is not streamed, abort.

    A stream begins when its first prompt left the queue, so that whoever waits in vain gets an error with a status.
    """
    request.state.in_engine = True  # which counts what becomes of it
    try:
        if stream:
            await unless_disconnected(request.receive, generation.wait_for_start())
            return EventStream(_events(generation, writer), generation.aclose)
        await unless_disconnected(request.receive, generation.collect())
        await generation.aclose()
        return Response(_json(writer.whole()), media_type="application/json")
    except BaseException:
        await generation.aclose()
        raise


async def _events(generation: Generation, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for number, new in deltas:
                events = b"".join(event(_json(chunk)) for chunk in writer.chunks(number, new))
                if events:
                    yield events
        for chunk in writer.last_chunks():
            yield event(_json(chunk))
        yield DONE
    except Exception as error:
        # It becomes the stream's last event, as its status is long gone.
        if not isinstance(error, VllmTeachError):
            logger.exception("a stream failed")
        yield event(describe_error(error).body())


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True).encode()
