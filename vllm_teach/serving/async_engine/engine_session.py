"""A running engine, as the event loop sees it: the requests in flight, and whether it lives."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from vllm_teach.engine.failure import shown
from vllm_teach.errors import EngineDeadError, QueueFullError, RequestTimeoutError
from vllm_teach.serving.async_engine.engine_link import EngineLink, LoopDelivery
from vllm_teach.serving.async_engine.hang_watch import HangWatch
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.async_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineEnded,
    EngineFailed,
    EngineReady,
    EngineUpdate,
    FromEngine,
    RequestDelta,
    StopEngine,
)
from vllm_teach.serving.async_engine.open_requests import OpenRequests
from vllm_teach.serving.async_engine.portable_errors import death
from vllm_teach.serving.async_engine.request_stream import OpenRequest, RequestStream
from vllm_teach.serving.metrics.step_report import StepReport

_KILL_AFTER = 5.0  # seconds that a process may take to stop

T = TypeVar("T")


class EngineSession:
    """Starts the engine at the other end of `link`, and hears what it says until it has ended; in one event loop.

    `ready` is done when the model is loaded, or when it could not be. `dead` says why nothing more comes: the engine
    failed, hangs or was stopped; from then on nothing is asked of it, and what it still says is not heard. `ended`: its
    thread or process is gone.
    """

    def __init__(
        self,
        link: EngineLink,
        limits: ServingLimits,
        on_report: Callable[[StepReport], None] | None,
        on_finished: Callable[[RequestDelta], None] | None,
    ) -> None:
        self.limits, self.loop = limits, asyncio.get_running_loop()
        self.requests = OpenRequests(self._tell_finished)
        self.ready: asyncio.Future[EngineReady] = self.loop.create_future()
        self.dead: EngineDeadError | None = None
        self.ended = asyncio.Event()
        self._link, self._on_report, self._on_finished = link, on_report, on_finished
        self._hangs = False
        delivery = LoopDelivery(self.loop, self._receive, link.kill)
        self._watch = HangWatch(self.loop, limits.step_timeout, lambda: delivery.num_heard, self._find_hanging)
        # Whoever forgets to stop it drops it at last.
        weakref.finalize(self, link.kill).atexit = False
        link.start(delivery)

    def open(self, message: AddRequest) -> RequestStream:
        """Send a request, return its stream. Raises QueueFullError, and InvalidArgumentError if it cannot be sent."""
        limits = self.limits
        if not self.requests.has_room(limits.max_queue):
            raise QueueFullError(f"max_queue={limits.max_queue} requests wait already: send this one later.")
        self._link.send(message)
        request = OpenRequest(message.request_id, message.prompt)
        self.requests.add(request)
        self._watch.start()
        for name in ("queue_timeout", "request_timeout"):
            seconds = getattr(limits, name)
            if seconds is not None:
                request.timers.append(self.loop.call_later(seconds, self._expire, request, name, seconds))
        return RequestStream(request, self._close, self._drop)

    def die(self, error: EngineDeadError) -> None:
        """End all that is in flight with `error`, unless that was done before."""
        if self.dead is not None:
            return
        self.dead = error
        self._watch.stop()
        if not self.ready.done():
            self.ready.set_exception(error)
        self.requests.fail_all(error)

    async def stop(self) -> None:
        """End the engine, and wait for it as long as that makes sense; see `AsyncLLMEngine.stop`."""
        self.die(EngineDeadError("the engine has been stopped: make another one."))
        self._link.send(StopEngine())
        patience = _KILL_AFTER if self._link.killable else 0.0 if self._hangs else self.limits.step_timeout
        if not await is_set_within(self.ended, patience) and self._link.killable:
            self._link.kill()
            await is_set_within(self.ended, _KILL_AFTER)
        if self.ended.is_set():
            self._link.join()

    def _receive(self, messages: list[FromEngine]) -> None:
        for message in messages:
            try:
                self._take(message)
            except Exception as error:  # noqa: BLE001 - or the readers would wait for ever for what is lost
                self.die(death("the server did not understand the engine", error))
                self._link.kill()

    def _take(self, message: FromEngine) -> None:
        match message:
            case EngineUpdate():
                if self.dead is None:
                    self._update(message)
            case EngineReady():
                if not self.ready.done():
                    self.ready.set_result(message)
            case EngineFailed(error=error):
                if not self.ready.done():
                    self.ready.set_exception(error)
                self.die(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
            case EngineEnded():
                self.ended.set()

    def _update(self, update: EngineUpdate) -> None:
        for delta in update.deltas:
            self.requests.take(delta)
        if not self.requests:
            self._watch.stop()
        if update.report is not None and self._on_report is not None:
            self._call(self._on_report, update.report)

    def _find_hanging(self) -> None:
        self._hangs = True
        self.die(
            EngineDeadError(
                f"the engine has said nothing for step_timeout={self.limits.step_timeout} seconds: restart the server."
            )
        )
        self._link.kill()

    def _expire(self, request: OpenRequest, name: str, seconds: float) -> None:
        if name == "queue_timeout" and self.requests.waiting.get(request.request_id) is not request:
            return
        done = "waited" if name == "queue_timeout" else "ran"
        request.fail(
            RequestTimeoutError(
                f"request {request.request_id!r} {done} longer than {name}={seconds} seconds and "
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
        with suppress(RuntimeError):  # the loop is closed, and the engine goes with it
            self.loop.call_soon_threadsafe(self._close, request)

    def _tell_finished(self, delta: RequestDelta) -> None:
        if self._on_finished is not None:
            self._call(self._on_finished, delta)

    def _call(self, callback: Callable[[T], None], argument: T) -> None:
        """Call what the server has given; its failure must not take the answers with it."""
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001 - reported by the loop's handler of exceptions
            self.loop.call_exception_handler({"message": f"{shown(callback)} failed", "exception": error})


async def is_set_within(event: asyncio.Event, timeout: float | None) -> bool:
    """Wait until `event` is set, at most `timeout` seconds; return whether it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()
