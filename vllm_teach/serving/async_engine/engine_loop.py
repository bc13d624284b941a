"""The loop around the engine's steps: takes what came, steps, tells what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue

from vllm_teach.engine.failure import engine_error
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.request import Request
from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.async_engine.deltas import Progress
from vllm_teach.serving.async_engine.messages import (
    AbortRequest,
    AddRequest,
    CheckRanks,
    EngineFailed,
    EngineReady,
    EngineUpdate,
    FromEngine,
    RequestDelta,
    ResetPrefixCache,
    StopEngine,
    ToEngine,
)
from vllm_teach.serving.async_engine.portable_errors import death
from vllm_teach.serving.metrics.step_report import StepReport
from vllm_teach.serving.metrics.step_reporter import StepReporter

_REPORT_EVERY = 0.1  # seconds


class EngineLoop:
    """Serves one engine: `inbox` has what the server wants, `send` takes what the engine says, and must not block.

    It waits for its inbox while it has nothing to do. Before each step it takes all that came, so that what an abort
    frees is free for that step. Each round sends one update: the server knows by it that the engine is alive. While it
    has requests it keeps other threads out of the engine; in between they may use it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        inbox: SimpleQueue[ToEngine],
        send: Callable[[FromEngine], None],
        reporter: StepReporter | None = None,
    ) -> None:
        self.engine, self.inbox, self.send, self.reporter = engine, inbox, send, reporter
        self._requests: dict[str, tuple[Request, Progress]] = {}  # the unfinished ones
        self._next_report = 0.0

    def run(self) -> None:
        """Serve until StopEngine comes. What breaks the loop comes out; either way none of its requests stays."""
        stopped = False
        while not stopped:
            message = self.inbox.get()
            with self.engine.exclusive.one_thread(wait=True), self._cleanup():
                stopped = self._work(message)

    def _work(self, message: ToEngine) -> bool:
        """Take `message` and what comes after it, and step until nothing is left to do; return whether to stop."""
        messages = [message]
        while True:
            # Those that are there now: what comes without end must not hold up the step.
            messages += [self.inbox.get() for _ in range(self.inbox.qsize())]
            deltas: list[RequestDelta] = []
            for each in messages:
                deltas += self._handle(each)
            if self.engine.ranks is not None:
                self.engine.ranks.check()
            stop = any(isinstance(each, StopEngine) for each in messages)
            if stop:
                deltas += (delta for request_id in list(self._requests) for delta in self._abort(request_id))
            elif self._requests:
                deltas += self._step()
            self.send(EngineUpdate(tuple(deltas), self._make_report()))
            if stop or not self._requests:
                return stop
            messages = []

    def _handle(self, message: ToEngine) -> Iterator[RequestDelta]:
        """Do what `message` wants and yield the last delta of a request that ended by it."""
        match message:
            case AddRequest():
                error = self._add(message)
                if error is not None:
                    count = len(message.prompt["prompt_token_ids"])
                    yield RequestDelta(message.request_id, finished=True, error=error, num_prompt_tokens=count)
            case AbortRequest():
                yield from self._abort(message.request_id)
            case ResetPrefixCache():
                self.engine.reset_prefix_cache()

    def _add(self, message: AddRequest) -> VllmTeachError | None:
        """Queue a request; return why it was refused, if it was."""
        try:
            self.engine.add_request(message.prompt, message.params, message.request_id, message.priority)
        except VllmTeachError as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - becomes the typed error of this request alone
            return engine_error("the request could not be queued", error, "send another one")
        request = self.engine.get_request(message.request_id)
        if message.arrival_time is not None:
            request.metrics.arrival_time = min(message.arrival_time, request.metrics.arrival_time)
        self._requests[message.request_id] = request, Progress(message.params.n, whole=message.whole)
        return None

    def _abort(self, request_id: str) -> Iterator[RequestDelta]:
        if request_id in self._requests:
            request, progress = self._requests.pop(request_id)
            self.engine.abort(request)
            delta = progress.advance(request.output())
            if delta is not None:
                yield delta

    def _step(self) -> Iterator[RequestDelta]:
        began = time.perf_counter()
        for output in self.engine.step():
            if output.request_id in self._requests:
                if self.reporter is not None and output.metrics is not None:
                    self.reporter.latencies.add(output.metrics, began)
                delta = self._requests[output.request_id][1].advance(output)
                if output.finished:
                    del self._requests[output.request_id]
                if delta is not None:
                    yield delta

    def _make_report(self) -> StepReport | None:
        """Return the engine's figures when they are due: not at each step, but whenever it goes idle."""
        now = time.monotonic()
        if self.reporter is None or (self._requests and now < self._next_report):
            return None
        self._next_report = now + _REPORT_EVERY
        return self.reporter.report()

    @contextmanager
    def _cleanup(self) -> Iterator[None]:
        """Where the block fails, free what its requests hold, as far as that is possible."""
        try:
            yield
        except BaseException:
            for request, _ in self._requests.values():
                try:
                    self.engine.abort(request)
                except Exception:  # noqa: BLE001 - the engine is broken, and how it broke is being raised
                    continue
            raise


def serve_engine(
    load: Callable[[], AbstractContextManager[LLM]],
    name: str,
    inbox: SimpleQueue[ToEngine],
    send: Callable[[FromEngine], None],
) -> None:
    """Load an LLM and serve it until StopEngine comes. Whatever goes wrong is sent as EngineFailed.

    `load` returns it in a context, which is left in the end; its typed errors are sent as they are. `name` is what
    EngineReady calls the model.
    """
    loaded = False
    try:
        with load() as llm:
            if llm.engine.ranks is not None:  # the loop may be waiting for its inbox
                llm.engine.ranks.when_one_dies(lambda: inbox.put(CheckRanks()))
            reporter = StepReporter(llm.engine)
            send(_describe(llm.engine, name))
            with llm.engine.exclusive.one_thread(wait=True):
                send(EngineUpdate(report=reporter.report()))  # of what was before: the metrics count from here on
            loaded = True
            EngineLoop(llm.engine, inbox, send, reporter).run()
    except BaseException as error:  # noqa: BLE001 - nobody but the server could tell
        if isinstance(error, VllmTeachError) and not loaded:
            send(EngineFailed(error))
        else:
            send(EngineFailed(death("the engine's loop failed" if loaded else "the engine did not start", error)))


def _describe(engine: LLMEngine, name: str) -> EngineReady:
    model = engine.model
    return EngineReady(
        model=name,
        max_model_len=engine.max_model_len,
        vocab_size=model.config.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        num_blocks=engine.kv.num_blocks,
        block_size=engine.kv.block_size,
        num_devices=1 if engine.ranks is None else engine.ranks.group.size,
    )
