"""One thread at a time, one change at a time, and no Ctrl-C in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from vllm_teach.errors import EngineError


class Exclusive:
    """Guards the state of one engine: blocks may be nested, and only the outermost one counts.

    Python raises KeyboardInterrupt between any two instructions of the main thread, so no order of assignments is safe
    from it. `hold` puts it off until the state is whole again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Of the main thread alone: no other one gets signals.
        self._deferring = False
        self._interrupts = 0
        # Of the thread that is inside.
        self._depth = 0
        self._changing = False
        self._put_off: deque[Callable[[], None]] = deque()

    @property
    def interrupted(self) -> bool:
        """Whether a Ctrl-C waits for the end of the outermost block."""
        return self._deferring and self._interrupts == 1

    @contextmanager
    def hold(self, *, wait: bool = False) -> Iterator[None]:
        """Keep other threads out as `one_thread` does, and put off a Ctrl-C until the outermost block is left.

        A second Ctrl-C is not put off, so that a block that hangs can be stopped.
        """
        with self._defer_interrupt(), self.one_thread(wait=wait):
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                while self._put_off and not self._depth:
                    self._put_off.popleft()()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Do as `hold` does, and raise EngineError where another change is under way.

        In the middle of a step the model and the tokenizer are called, which may call the engine.
        """
        with self.hold():
            if self._changing:
                raise EngineError("this LLM is in the middle of a step or of adding a request: call it afterwards.")
            self._changing = True
            try:
                yield
            finally:
                self._changing = False

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` when the outermost of the blocks that `hold` this is left. Called inside of one.

        For what may come in the middle of a change, as the end of a generator does that the garbage collector finds.
        """
        self._put_off.append(action)

    @contextmanager
    def one_thread(self, *, wait: bool = False) -> Iterator[None]:
        """Raise EngineError if another thread is inside, or with `wait` wait until it has left."""
        acquired = False
        try:
            with self._defer_interrupt():
                acquired = self._lock.acquire(blocking=wait)
            if not acquired:
                raise EngineError("this LLM is used by another thread: give each thread its own LLM or use a lock.")
            yield
        finally:
            if acquired:
                self._lock.release()

    @contextmanager
    def _defer_interrupt(self) -> Iterator[None]:
        previous = signal.getsignal(signal.SIGINT)
        # None: the handler is no Python function and could not be put back. SIG_IGN and SIG_DFL cannot be called.
        if threading.current_thread() is not threading.main_thread() or self._deferring or not callable(previous):
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                previous(signum, frame)

        self._interrupts = 0
        try:
            signal.signal(signal.SIGINT, note)
            self._deferring = True
            yield
        finally:
            self._deferring = False
            signal.signal(signal.SIGINT, previous)
            if self._interrupts == 1:
                previous(signal.SIGINT, None)  # Python's own raises KeyboardInterrupt
