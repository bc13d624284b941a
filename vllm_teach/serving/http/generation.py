"""What one HTTP request has in the engine: a request for each of its prompts, read as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.prompts import TokensPrompt
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.deltas import Answer
from vllm_teach.serving.async_engine.messages import CompletionDelta, RequestDelta
from vllm_teach.serving.async_engine.request_stream import RequestStream
from vllm_teach.serving.http.openai_responses import PromptTokensDetails, Usage


@dataclass
class Generation:
    """The requests of one HTTP request, queued when this is made, all or none.

    Read its `deltas` once, or `collect` the whole. `created` is when it began, in seconds since 1970. Call
    `aclose` in the end: it aborts what is still running.
    """

    engine: AsyncLLMEngine
    request_id: str
    _answers: list[Answer]
    created: int = field(default_factory=lambda: int(time.time()))
    _streams: list[RequestStream] = field(default_factory=list)
    _first: tuple[int, RequestDelta] | None = None
    _deltas: AsyncGenerator[tuple[int, RequestDelta], None] | None = None

    @classmethod
    async def start(
        cls,
        engine: AsyncLLMEngine,
        request_id: str,
        prompts: Sequence[TokensPrompt],
        params: SamplingParams,
        priority: int = 0,
        *,
        whole: bool = False,
    ) -> Generation:
        """Queue a request for each prompt. Raises what `AsyncLLMEngine.submit` raises; then none is left queued.

        `whole` is for answers that nobody reads piece by piece.
        """
        answers = [Answer(request_id, prompt, params.n, params.logprobs is not None) for prompt in prompts]
        generation = cls(engine, request_id, answers)
        try:
            for number, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{number}"
                stream = engine.submit(prompt, params, request_id=name, priority=priority, whole=whole)
                generation._streams.append(stream)
        except BaseException:
            await generation.aclose()
            raise
        return generation

    @property
    def answers(self) -> list[RequestOutput]:
        """What came so far for each prompt; the texts of one are there when it is finished."""
        return [answer.output for answer in self._answers]

    async def wait_for_start(self) -> None:
        """Wait until the first prompt left the queue. An error until then can still have a status of its own."""
        self._deltas = self._merge() if len(self._streams) > 1 else self._only()
        self._first = await anext(self._deltas)

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """Yield (number of the prompt, what is new of one of its completions), all to the end."""
        if self._deltas is None:
            await self.wait_for_start()
        assert self._deltas is not None
        assert self._first is not None
        for new in self._take(*self._first):
            yield new
        async for number, delta in self._deltas:
            for new in self._take(number, delta):
                yield new

    async def collect(self) -> list[RequestOutput]:
        """Return all answers, when they are whole."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass
        return self.answers

    def usage(self, completion_tokens: int | None = None) -> Usage:
        """Return the tokens so far; `completion_tokens` says how many there are where not all are handed out."""
        prompt = sum(len(answer.prompt_token_ids) for answer in self.answers)
        if completion_tokens is None:
            completion_tokens = sum(len(output.token_ids) for answer in self.answers for output in answer.outputs)
        cached = PromptTokensDetails(cached_tokens=sum(answer.num_cached_tokens for answer in self.answers))
        total = prompt + completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion_tokens,
            total_tokens=total,
            prompt_tokens_details=cached,
        )

    async def aclose(self) -> None:
        """Abort what is running. Can be called twice."""
        if self._deltas is not None:
            await self._deltas.aclose()
        for stream in self._streams:
            await stream.aclose()

    def _take(self, number: int, delta: RequestDelta) -> list[tuple[int, CompletionDelta]]:
        self._answers[number].add(delta)
        return [(number, new) for new in delta.completions]

    async def _only(self) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        async for delta in self._streams[0]:
            yield 0, delta

    async def _merge(self) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """Yield what is new of any prompt as it comes; the first error ends it."""
        arrived: asyncio.Queue[tuple[int, RequestDelta | None]] = asyncio.Queue()

        async def read(number: int) -> None:
            async for delta in self._streams[number]:
                arrived.put_nowait((number, delta))

        readers = [asyncio.create_task(read(number)) for number in range(len(self._streams))]
        for number, reader in enumerate(readers):
            reader.add_done_callback(partial(_tell_end, arrived, number))
        try:
            running = len(readers)
            while running:
                number, delta = await arrived.get()
                if delta is not None:
                    yield number, delta
                else:
                    readers[number].result()
                    running -= 1
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


def _tell_end(arrived: asyncio.Queue[tuple[int, RequestDelta | None]], number: int, reader: asyncio.Task[None]) -> None:
    arrived.put_nowait((number, None))
