"""The engine as an event loop sees it: requests go in, streams come out, and nothing waits for a step."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vllm_teach.engine.failure import shown
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.prompts import Prompt
from vllm_teach.engine.request_checks import check_priority, check_request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import EngineDeadError, InvalidArgumentError, QueueFullError, RequestTimeoutError
from vllm_teach.serving.deltas import Answer
from vllm_teach.serving.engine_link import EngineLink, LoopDelivery
from vllm_teach.serving.engine_process import EngineProcess
from vllm_teach.serving.engine_thread import EngineThread
from vllm_teach.serving.hang_watch import HangWatch
from vllm_teach.serving.limits import ServingLimits
from vllm_teach.serving.messages import (
    AbortRequest,
    AddRequest,
    EngineEnded,
    EngineFailed,
    EngineReady,
    EngineUpdate,
    FromEngine,
    RequestDelta,
    ResetPrefixCache,
    StopEngine,
)
from vllm_teach.serving.open_requests import OpenRequests
from vllm_teach.serving.portable_errors import death, renewed
from vllm_teach.serving.request_stream import OpenRequest, RequestStream
from vllm_teach.serving.step_report import StepReport

_KILL_AFTER = 5.0  # seconds that a process may take to stop

T = TypeVar("T")


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
        self._requests = OpenRequests(self._tell_finished)
        self._numbers = itertools.count()  # of requests without a name of their own
        self._ready: EngineReady | None = None
        self._dead: EngineDeadError | None = None
        self._draining = self._hangs = False
        self._ended = asyncio.Event()  # whether the thread or process is gone
        # There once it was started:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: asyncio.Future[EngineReady]
        self._watch: HangWatch

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

        While requests are in flight others who use `llm` get an EngineError. The model's name in `ready` is its class.
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
        if self._loop is not None or self._dead is not None:
            raise InvalidArgumentError("this engine was started or stopped before: make another one.")
        self._loop = asyncio.get_running_loop()
        self._answer = self._loop.create_future()
        delivery = LoopDelivery(self._loop, self._receive, self._link.kill)
        self._watch = HangWatch(self._loop, self.limits.step_timeout, lambda: delivery.num_heard, self._find_hanging)
        # Whoever forgets to stop it drops it at last.
        weakref.finalize(self, self._link.kill).atexit = False
        self._link.start(delivery)
        try:
            return await self._answer
        except BaseException:
            self._link.kill()
            await self.stop()
            raise

    @property
    def ready(self) -> EngineReady:
        """What is to know of the model; EngineDeadError before `start`."""
        if self._ready is None:
            raise EngineDeadError("the engine has not started: await start() first.")
        return self._ready

    @property
    def tokenizer(self) -> EngineTokenizer:
        """This process's own tokenizer of the model; EngineDeadError before `start`."""
        return self._link.tokenizer

    @property
    def num_waiting(self) -> int:
        """Requests accepted, but not in a step yet."""
        return len(self._requests.waiting)

    @property
    def num_running(self) -> int:
        """Requests that were in a step and have not ended."""
        return len(self._requests.running)

    @property
    def draining(self) -> bool:
        """Whether `drain` or `stop` was called: new requests are refused."""
        return self._draining

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestStream:
        """Queue a request and return its answer as it comes. Synchronous: it waits for nothing.

        A text is tokenised here and now, which holds up the event loop: give token ids for a long one. Raises
        InvalidArgumentError (also for a `request_id` in use), PromptTooLongError, QueueFullError, or EngineDeadError
        when the engine is not started, draining, stopped or dead.
        """
        loop = self._check_open()
        ready, limits = self.ready, self.limits
        checked = check_request(
            prompt, params, self.tokenizer, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len
        )
        priority = check_priority(priority)
        if request_id is None:
            request_id = next(name for name in map("async-{}".format, self._numbers) if name not in self._requests)
        elif not isinstance(request_id, str) or request_id in self._requests:
            raise InvalidArgumentError(f"request_id={shown(request_id)} is in use or no string: choose another one.")
        if self.num_waiting >= limits.max_queue:
            raise QueueFullError(f"max_queue={limits.max_queue} requests wait already: send this one later.")
        self._link.send(AddRequest(request_id, checked, params.copy(), priority, time.perf_counter()))
        request = OpenRequest(request_id, checked)
        self._requests.add(request)
        self._watch.start()
        for name in ("queue_timeout", "request_timeout"):
            seconds = getattr(limits, name)
            if seconds is not None:
                request.timers.append(loop.call_later(seconds, self._expire, request, name))
        return RequestStream(request, self._close, self._drop)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestOutput:
        """Return the whole answer. Raises what `submit` and its stream raise; cancelled, it aborts the request."""
        async with self.submit(prompt, params, request_id=request_id, priority=priority) as stream:
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
        if self._dead is not None:
            raise renewed(self._dead)
        _ = self.ready

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until those in flight have ended, at most `timeout` seconds.

        Returns whether they have. `check_health` is content meanwhile.
        """
        self._draining = True
        return await _is_set_within(self._requests.idle, timeout)

    async def stop(self) -> None:
        """End the engine's thread or process; requests in flight fail with EngineDeadError. Can be called twice.

        A process that does not end within seconds is killed. A thread is waited for until its step is done, at most
        `limits.step_timeout`; one that hangs stays until this process ends, and so does a download that was begun.
        """
        self._draining = True
        self._die(EngineDeadError("the engine has been stopped: make another one."))
        if self._loop is None:
            return
        self._link.send(StopEngine())
        patience = _KILL_AFTER if self._link.killable else 0.0 if self._hangs else self.limits.step_timeout
        if not await _is_set_within(self._ended, patience) and self._link.killable:
            self._link.kill()
            await _is_set_within(self._ended, _KILL_AFTER)
        if self._ended.is_set():
            self._link.join()

    def _check_open(self) -> asyncio.AbstractEventLoop:
        self.check_health()
        if self._draining:
            raise EngineDeadError("the engine takes no new requests, as it is about to stop: send it to another one.")
        loop = self._loop
        if loop is None or asyncio.get_running_loop() is not loop:
            raise InvalidArgumentError("the engine is used in another event loop than start() was: use it in that one.")
        return loop

    def _receive(self, messages: list[FromEngine]) -> None:
        for message in messages:
            try:
                self._take(message)
            except Exception as error:  # noqa: BLE001 - or the readers would wait for ever for what is lost
                self._die(death("the server did not understand the engine", error))
                self._link.kill()

    def _take(self, message: FromEngine) -> None:
        match message:
            case EngineUpdate():
                if self._dead is None:
                    self._update(message)
            case EngineReady():
                if not self._answer.done():
                    self._ready = message
                    self._answer.set_result(message)
            case EngineFailed(error=error):
                if not self._answer.done():
                    self._answer.set_exception(error)
                self._die(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
            case EngineEnded():
                self._ended.set()

    def _update(self, update: EngineUpdate) -> None:
        for delta in update.deltas:
            self._requests.take(delta)
        if not self._requests:
            self._watch.stop()
        if update.report is not None and self._on_report is not None:
            self._call(self._on_report, update.report)

    def _die(self, error: EngineDeadError) -> None:
        """Nothing more is asked of the engine, and nothing of what it says is heard."""
        if self._dead is not None:
            return
        self._dead = error
        if self._loop is not None:
            self._watch.stop()
            if not self._answer.done():
                self._answer.set_exception(error)
        self._requests.fail_all(error)

    def _find_hanging(self) -> None:
        self._hangs = True
        self._die(
            EngineDeadError(
                f"the engine has said nothing for step_timeout={self.limits.step_timeout} seconds: restart the server."
            )
        )
        self._link.kill()

    def _expire(self, request: OpenRequest, name: str) -> None:
        if name == "queue_timeout" and self._requests.waiting.get(request.request_id) is not request:
            return
        done = "waited" if name == "queue_timeout" else "ran"
        request.fail(
            RequestTimeoutError(
                f"request {request.request_id!r} {done} longer than {name}={getattr(self.limits, name)} seconds and "
                "was aborted: send it again when the server has less to do."
            )
        )
        self._link.send(AbortRequest(request.request_id))

    def _close(self, request: OpenRequest) -> None:
        running = not request.ended
        request.close()
        if running:
            self._link.send(AbortRequest(request.request_id))

    def _drop(self, request: OpenRequest) -> None:
        """Close a request whose stream the garbage collector found, which may be in any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, and the engine goes with it
            self._loop.call_soon_threadsafe(self._close, request)

    def _tell_finished(self, delta: RequestDelta) -> None:
        if self._on_finished is not None:
            self._call(self._on_finished, delta)

    def _call(self, callback: Callable[[T], None], argument: T) -> None:
        """Call what the server has given; its failure must not take the answers with it."""
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001 - reported by the loop's handler of exceptions
            assert self._loop is not None
            self._loop.call_exception_handler({"message": f"{shown(callback)} failed", "exception": error})


async def _is_set_within(event: asyncio.Event, timeout: float | None) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()
