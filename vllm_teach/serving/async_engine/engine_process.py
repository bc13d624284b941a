"""An engine that computes in a process of its own."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_teach.engine.failure import shown
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import EngineDeadError, InvalidArgumentError, VllmTeachError
from vllm_teach.models.resolve import resolve_model
from vllm_teach.models.tokenizer import load_tokenizer
from vllm_teach.openmp import wait_shortly
from vllm_teach.serving.async_engine.engine_child import PATIENCE
from vllm_teach.serving.async_engine.message_pipe import MessagePipe
from vllm_teach.serving.async_engine.messages import EngineEnded, EngineFailed, FromEngine, StopEngine, ToEngine
from vllm_teach.serving.async_engine.portable_errors import death

_PROGRAM = "from vllm_teach.serving.async_engine.engine_child import main; main()"


class EngineProcess:
    """An `EngineLink` to a process that loads `model` with `engine_args`, `LLM`'s keyword arguments.

    The process is a fresh interpreter and no fork, which neither threads nor a GPU's state survive. Unlike
    multiprocessing's it does not run the main module again, so that notebooks, `python -c` and scripts without a guard
    can start one. A thread of this process starts it, reads what it says, and learns of its end by the end of the pipe.

    Raises InvalidArgumentError for `engine_args` that cannot be sent.
    """

    killable = True

    def __init__(self, model: str | Path, engine_args: Mapping[str, Any]) -> None:
        self.model = str(model)
        try:
            self._arguments = pickle.dumps(dict(engine_args))
        except Exception as error:
            raise InvalidArgumentError(
                f"engine_args={shown(engine_args)} cannot be sent to a process ({error}): use values that pickle takes."
            ) from error
        self._tokenizer: EngineTokenizer | None = None
        self._pipe: MessagePipe | None = None
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        # Whichever of the two that is set second sees the other one.
        self._process: subprocess.Popen[bytes] | None = None
        self._doomed = False

    @property
    def tokenizer(self) -> EngineTokenizer:
        """This process's own."""
        if self._tokenizer is None:
            raise EngineDeadError("the engine has not started: await start() first.")
        return self._tokenizer

    @property
    def pid(self) -> int | None:
        """The process's number, once there is one."""
        return None if self._process is None else self._process.pid

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to load; see `EngineLink`."""
        # A daemon, because the interpreter waits for others before it calls what was registered for the exit.
        self._thread = threading.Thread(target=self._run, args=(deliver,), name="vllm-teach engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Write `message` to the process."""
        if self._pipe is not None:
            try:
                self._pipe.send(message)
            except Exception as error:
                raise InvalidArgumentError(
                    f"{shown(message)} cannot be sent to the engine's process ({error}): use plain values."
                ) from error

    def kill(self) -> None:
        """Kill the process; what its end brings about follows."""
        self._doomed = True
        if self._process is not None and os.getpid() == self._owner:  # and not in a fork of the server
            self._process.kill()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, deliver: Callable[[FromEngine], None]) -> None:
        try:
            folder = resolve_model(self.model)
            if self._doomed:
                return
            process, pipe = self._launch()
            patience = 0.0
            try:
                pipe.send((self.model, self._arguments))
                self._tokenizer = load_tokenizer(folder)  # while the process loads the model
                _forward(pipe, deliver)
                patience = PATIENCE
            finally:
                _reap(process, pipe, patience)
                atexit.unregister(self._stop_at_exit)
            deliver(EngineFailed(_died(process.returncode)))
        except VllmTeachError as error:
            deliver(EngineFailed(error))
        except BaseException as error:  # noqa: BLE001 - nobody but the server could tell
            deliver(EngineFailed(death("the engine's process cannot be started or understood", error)))
        finally:
            deliver(EngineEnded())

    def _launch(self) -> tuple[subprocess.Popen[bytes], MessagePipe]:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # -P: what lies in the current folder is no module by that alone
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **wait_shortly(os.environ), "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C in the terminal is the server's affair
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._pipe = process, MessagePipe(process.stdout, process.stdin)
        if self._doomed:
            process.kill()
        atexit.register(self._stop_at_exit)
        return process, self._pipe

    def _stop_at_exit(self) -> None:
        """Let the process end in good order when the server's ends without having stopped it."""
        self.send(StopEngine())
        assert self._thread is not None
        self._thread.join(PATIENCE)
        self.kill()


def _forward(pipe: MessagePipe, deliver: Callable[[FromEngine], None]) -> None:
    """Deliver what comes through `pipe` until the other side is gone."""
    try:
        while True:
            deliver(pipe.receive())
    except EOFError:
        return


def _reap(process: subprocess.Popen[bytes], pipe: MessagePipe, patience: float) -> None:
    """Wait until `process` has ended, kill it if that takes longer than `patience` seconds, and close the pipe."""
    timer = threading.Timer(patience, process.kill)
    timer.daemon = True
    timer.start()
    process.wait()
    timer.cancel()
    timer.join()
    pipe.close()


def _died(code: int) -> EngineDeadError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    why = "its standard error may say why"
    if -code == getattr(signal, "SIGBUS", None):
        why = "a swap file that was cut short, or whose disk copies on write and is full, does that"
    return EngineDeadError(f"the engine's process {how}: start the engine again; {why}.")
