"""An engine that computes in a thread of the server's process."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.serving.async_engine.engine_loop import serve_engine
from vllm_teach.serving.async_engine.messages import EngineEnded, FromEngine, StopEngine, ToEngine

_EXIT_PATIENCE = 10.0  # seconds


class EngineThread:
    """An `EngineLink` to an LLM of this process. PyTorch lets go of the interpreter while it computes."""

    killable = False

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._thread: Thread | None = None

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The LLM's own."""
        return self.llm.tokenizer

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to serve; see `EngineLink`."""
        # A daemon, because the interpreter waits for others before it calls what was registered for the exit.
        self._thread = Thread(target=self._run, args=(deliver,), name="vllm-teach engine", daemon=True)
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Put `message` into the engine's inbox."""
        self._inbox.put(message)

    def kill(self) -> None:
        """Ask the engine to end after its current step."""
        self._inbox.put(StopEngine())

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, deliver: Callable[[FromEngine], None]) -> None:
        try:
            serve_engine(lambda: nullcontext(self.llm), self.llm.name, self._inbox, deliver)
        finally:
            atexit.unregister(self._stop_at_exit)
            deliver(EngineEnded())

    def _stop_at_exit(self) -> None:
        """Keep a step from running on while the interpreter is taken down, which can crash it."""
        self.kill()
        if self._thread is not None:
            self._thread.join(_EXIT_PATIENCE)
