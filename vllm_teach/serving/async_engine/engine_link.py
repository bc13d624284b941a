"""What joins an event loop to an engine that computes elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakMethod

from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.serving.async_engine.messages import FromEngine, ToEngine


class EngineLink(Protocol):
    """An engine in a thread or a process of its own. Its methods wait for nothing and may be called in any thread."""

    killable: bool  # whether `kill` ends an engine that hangs

    @property
    def tokenizer(self) -> EngineTokenizer:
        """This process's tokenizer of the model; there once EngineReady was delivered."""
        ...

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin. `deliver` gets all that the engine says, in threads of the link: EngineEnded comes once, and last."""
        ...

    def send(self, message: ToEngine) -> None:
        """Tell the engine something; one that has ended hears nothing. InvalidArgumentError for what cannot be sent."""
        ...

    def kill(self) -> None:
        """End the engine, at once if it is killable, else after its current step."""
        ...

    def join(self) -> None:
        """Wait for the link's own threads, which end right after EngineEnded was delivered."""
        ...


class LoopDelivery:
    """Brings messages from other threads into an event loop, as many at once as have come.

    `receive`, a bound method, is called in the loop; its object is not kept alive. When the loop is closed, which only
    those that have something to deliver can notice, `give_up` is called instead. `num_heard` counts all messages.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[list[FromEngine]], None],
        give_up: Callable[[], None],
    ) -> None:
        self.num_heard = 0
        self._loop, self._receive, self._give_up = loop, WeakMethod(receive), give_up
        self._lock = threading.Lock()
        self._messages: list[FromEngine] = []

    def __call__(self, message: FromEngine) -> None:
        """Deliver `message`, soon and behind those before it."""
        with self._lock:
            self.num_heard += 1
            self._messages.append(message)
            scheduled = len(self._messages) > 1
        if not scheduled:
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed
                self._give_up()

    def _flush(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, []
        receive = self._receive()
        if receive is not None:
            receive(messages)
