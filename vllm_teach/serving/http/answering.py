"""A generation as an HTTP answer: whole, or as a stream, in whatever form a route's writer gives it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.async_engine.messages import CompletionDelta
from vllm_teach.serving.http.beside_the_loop import beside_the_loop
from vllm_teach.serving.http.disconnect import unless_disconnected
from vllm_teach.serving.http.generation import Generation
from vllm_teach.serving.http.http_errors import describe_error
from vllm_teach.serving.http.service import Service
from vllm_teach.serving.http.sse import DONE, EventStream, event

logger = logging.getLogger(__name__)

# To write a log-probability takes some 10 us, as much as to read so many characters; an answer may have 100,000.
_COST = 30


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


async def answer(
    request: Request, service: Service, generation: Generation, writer: AnswerWriter, stream: bool
) -> Response:
    """Return the answer; when the client goes away before its end, also of one that is not streamed, abort.

    A stream begins when its first prompt left the queue, so that whoever waits in vain gets an error with a status.
    """
    request.state.in_engine = True  # which counts what becomes of it
    try:
        if stream:
            await unless_disconnected(request.receive, generation.wait_for_start())
            return EventStream(_events(service, generation, writer), generation.aclose)
        await unless_disconnected(request.receive, generation.collect())
        await generation.aclose()
        outputs = [output for answered in generation.answers for output in answered.outputs]
        size = _num_logprobs(outputs) + sum(_num_prompt_logprobs(answered) for answered in generation.answers)
        body = await beside_the_loop(_COST * size, lambda: _json(writer.whole()))
        return Response(body, media_type="application/json")
    except BaseException:
        await generation.aclose()
        raise


async def _events(service: Service, generation: Generation, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()  # the prompts whose echo is written
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for number, new in deltas:
                size = _num_logprobs([new])
                if number not in begun:
                    begun.add(number)
                    size += _num_prompt_logprobs(generation.answers[number])
                events = await beside_the_loop(_COST * size, partial(_join_events, writer.chunks(number, new)))
                if events:
                    yield events
        for chunk in writer.last_chunks():
            yield event(_json(chunk))
        yield DONE
    except Exception as error:
        # It becomes the stream's last event, as its status is long gone.
        if not isinstance(error, VllmTeachError):
            logger.exception("a stream failed")
            service.count_error(error)
        yield event(describe_error(error).body())


def _join_events(chunks: Iterator[BaseModel]) -> bytes:
    return b"".join(event(_json(chunk)) for chunk in chunks)


def _num_logprobs(pieces: Sequence[CompletionDelta | CompletionOutput]) -> int:
    return sum(len(choices) for piece in pieces for choices in piece.logprobs or ())


def _num_prompt_logprobs(answered: RequestOutput) -> int:
    return sum(len(choices or ()) for choices in answered.prompt_logprobs or ())


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True).encode()
