"""The engine as an event loop sees it: requests go in, streams come out, and nothing waits for a step."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_teach.engine.failure import shown
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.prompts import Prompt
from vllm_teach.engine.request_checks import check_priority, check_request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.serving.async_engine.deltas import Answer
from vllm_teach.serving.async_engine.engine_link import EngineLink
from vllm_teach.serving.async_engine.engine_process import EngineProcess
from vllm_teach.serving.async_engine.engine_session import EngineSession, is_set_within
from vllm_teach.serving.async_engine.engine_thread import EngineThread
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.async_engine.messages import AddRequest, EngineReady, RequestDelta, ResetPrefixCache
from vllm_teach.serving.async_engine.portable_errors import renewed
from vllm_teach.serving.async_engine.request_stream import RequestStream
from vllm_teach.serving.metrics.step_report import StepReport


class AsyncLLMEngine:
    """Runs an engine in a thread (`of`) or a process (`spawn`) of its own, for one event loop.

    `start` it, `submit` requests or `generate`, and `stop` it; all in the event loop that `start` ran in. `on_report`
    gets the engine's figures, and `on_finished` the last word about each accepted request (its `error` is what the
    reader got; an abort has the finish_reason "abort"); both are called in that loop.

    When the engine's loop fails, its process dies, or it hangs (`limits.step_timeout`), each request in flight fails
    with EngineDeadError, and so does whatever is asked afterwards. A request that fails alone harms no other.
    """

    def __init__(
        self,
        link: EngineLink,
        limits: ServingLimits | None,
        on_report: Callable[[StepReport], None] | None,
        on_finished: Callable[[RequestDelta], None] | None,
    ) -> None:
        """For `of` and `spawn`."""
        self.limits = ServingLimits() if limits is None else limits
        self._link, self._on_report, self._on_finished = link, on_report, on_finished
        self._numbers = itertools.count()  # of requests without a name of their own
        self._draining = self._stopped = False
        self._session: EngineSession | None = None  # there once it was started

    @classmethod
    def of(
        cls,
        llm: LLM,
        limits: ServingLimits | None = None,
        *,
        on_report: Callable[[StepReport], None] | None = None,
        on_finished: Callable[[RequestDelta], None] | None = None,
    ) -> AsyncLLMEngine:
        """Return an engine that computes in a thread of this process.

        While requests are in flight others who use `llm` get an EngineError. The model's name in `ready` is `llm.name`.
        """
        return cls(EngineThread(llm), limits, on_report, on_finished)

    @classmethod
    def spawn(
        cls,
        model: str | Path,
        engine_args: Mapping[str, Any] | None = None,
        limits: ServingLimits | None = None,
        *,
        on_report: Callable[[StepReport], None] | None = None,
        on_finished: Callable[[RequestDelta], None] | None = None,
    ) -> AsyncLLMEngine:
        """Return an engine that computes in a process of its own; `engine_args` are `LLM`'s keyword arguments.

        Raises InvalidArgumentError when they cannot be sent to a process.
        """
        return cls(EngineProcess(model, engine_args or {}), limits, on_report, on_finished)

    async def start(self) -> EngineReady:
        """Load the model and return what is to know of it. What `LLM` raises comes out of here.

        Raises EngineDeadError when the process dies before it is ready. When it fails or is cancelled, nothing stays.
        """
        if self._session is not None or self._stopped:
            raise InvalidArgumentError("this engine was started or stopped before: make another one.")
        self._session = EngineSession(self._link, self.limits, self._on_report, self._on_finished)
        try:
            return await self._session.ready
        except BaseException:
            self._link.kill()
            await self.stop()
            raise

    @property
    def ready(self) -> EngineReady:
        """What is to know of the model; EngineDeadError before `start`."""
        ready = None if self._session is None else self._session.ready
        if ready is None or not ready.done() or ready.cancelled() or ready.exception() is not None:
            raise EngineDeadError("the engine has not started: await start() first.")
        return ready.result()

    @property
    def tokenizer(self) -> EngineTokenizer:
        """This process's own tokenizer of the model; EngineDeadError before `start`."""
        return self._link.tokenizer

    @property
    def num_waiting(self) -> int:
        """Requests accepted, but not in a step yet."""
        return 0 if self._session is None else len(self._session.requests.waiting)

    @property
    def num_running(self) -> int:
        """Requests that were in a step and have not ended."""
        return 0 if self._session is None else len(self._session.requests.running)

    @property
    def draining(self) -> bool:
        """Whether `drain` or `stop` was called: new requests are refused."""
        return self._draining

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        whole: bool = False,
    ) -> RequestStream:
        """Queue a request and return its answer as it comes. Synchronous: it waits for nothing.

        With `whole` the answer comes at its end, which spares both sides the work of each step.

        A text is tokenised here and now, which holds up the event loop: give token ids for a long one. Raises
        InvalidArgumentError (also for a `request_id` in use), PromptTooLongError, QueueFullError, or EngineDeadError
        when the engine is not started, draining, stopped or dead.
        """
        session, ready = self._check_open(), self.ready
        checked = check_request(
            prompt, params, self.tokenizer, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len
        )
        priority = check_priority(priority)
        if request_id is None:
            request_id = next(name for name in map("async-{}".format, self._numbers) if name not in session.requests)
        elif not isinstance(request_id, str) or request_id in session.requests:
            raise InvalidArgumentError(f"request_id={shown(request_id)} is in use or no string: choose another one.")
        return session.open(AddRequest(request_id, checked, params.copy(), priority, time.perf_counter(), whole))

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestOutput:
        """Return the whole answer. Raises what `submit` and its stream raise; cancelled, it aborts the request."""
        async with self.submit(prompt, params, request_id=request_id, priority=priority, whole=True) as stream:
            answer = Answer(stream.request_id, stream.prompt, params.n, params.logprobs is not None)
            async for delta in stream:
                answer.add(delta)
        return answer.output

    def reset_prefix_cache(self) -> None:
        """Forget every computed prefix, before the next step. Raises EngineDeadError as `submit` does."""
        self._check_open()
        self._link.send(ResetPrefixCache())

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine is not started, has been stopped, is dead or hangs."""
        if self._session is not None and self._session.dead is not None:
            raise renewed(self._session.dead)
        if self._stopped:
            raise EngineDeadError("the engine has been stopped: make another one.")
        _ = self.ready

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until those in flight have ended, at most `timeout` seconds.

        Returns whether they have. `check_health` is content meanwhile.
        """
        self._draining = True
        return self._session is None or await is_set_within(self._session.requests.idle, timeout)

    async def stop(self) -> None:
        """End the engine's thread or process; requests in flight fail with EngineDeadError. Can be called twice.

        A process that does not end within seconds is killed. A thread is waited for until its step is done, at most
        `limits.step_timeout`; one that hangs stays until this process ends, and so does a download that was begun.
        """
        self._draining = self._stopped = True
        if self._session is not None:
            await self._session.stop()

    def _check_open(self) -> EngineSession:
        self.check_health()
        if self._draining:
            raise EngineDeadError("the engine takes no new requests, as it is about to stop: send it to another one.")
        session = self._session
        if session is None or asyncio.get_running_loop() is not session.loop:
            raise InvalidArgumentError("the engine is used in another event loop than start() was: use it in that one.")
        return session
