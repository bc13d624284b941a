"""Child processes that work for this one, and do not outlive it.

A child is a fresh interpreter that imports what it needs: unlike multiprocessing's, it does not run the parent's main
module again, so it can be started from a notebook, from `python -c` and from a script without a guard. Its standard
input brings what it has to do and then stays open: when it ends, as it does however the parent ends, so does the child.
On its standard output a child says one line: that it is ready, or why it never will be.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from vllm_teach.errors import EngineDeadError, InvalidArgumentError, VllmTeachError
from vllm_teach.parallel.told_errors import told_error

PROGRAM = "from vllm_teach.parallel.worker_main import main; main()"
# Those that were told to end have no reason to take longer.
_GRACE = 3.0


class _Worker:
    """One child, and the thread that watches it. `spoken` is set when it has said its line, `ended` when it is gone."""

    def __init__(self, name: str, job: bytes, environment: Mapping[str, str], on_end: list[Callable[[], None]]) -> None:
        self.name, self.failure = name, ""
        self.spoken, self.ended = threading.Event(), threading.Event()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        self.process = subprocess.Popen(
            # -P: a file of the current folder must not stand for one of Python's own, unless it does so here.
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **environment},
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's affair
        )
        threading.Thread(target=self._watch, args=(on_end,), name=f"watch {name}", daemon=True).start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its watcher tells
            self.process.stdin.write(job)
            self.process.stdin.flush()

    def _watch(self, on_end: list[Callable[[], None]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.failure = output.readline().decode(errors="replace").strip()
            self.spoken.set()
            output.read()  # until it ends
        self.process.wait()
        self.ended.set()
        for action in on_end:
            action()

    def error(self) -> VllmTeachError:
        """Return what went wrong with a child that could not start, or has ended."""
        if self.failure not in ("", "ready"):
            return told_error(self.name, self.failure)
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return EngineDeadError(f"{self.name} (pid {self.process.pid}) {how}: load the model again.")


class WorkerProcesses:
    """Children that run `entry`, "module:function", one for each of `arguments`, a tuple of what the function takes.

    The function's first parameter is a callable that tells that the child is ready. `names` are for messages;
    `environment` is what the children have besides this process's own. They end when `stop` is called, when this object
    is collected, and when this process ends. Raises InvalidArgumentError for arguments that cannot be pickled.
    """

    def __init__(
        self, entry: str, names: Sequence[str], arguments: Sequence[tuple], environment: Mapping[str, str]
    ) -> None:
        try:
            jobs = [pickle.dumps(pickle.dumps((entry, each))) for each in arguments]
        except Exception as error:  # whatever an object's own pickling raises
            raise InvalidArgumentError(
                f"arguments for {entry} cannot be sent to a process ({error}): use objects of importable classes."
            ) from error
        # The watchers know this list and not this object, which can so be collected while they wait.
        self._on_end: list[Callable[[], None]] = []
        self._workers: list[_Worker] = []
        self.stop: Callable[[], None] = weakref.finalize(self, _stop, self._workers, self._on_end, os.getpid())
        try:
            for name, job in zip(names, jobs, strict=True):
                self._workers.append(_Worker(name, job, environment, self._on_end))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """The children's process ids."""
        return [worker.process.pid for worker in self._workers]

    def wait_until_ready(self, patience: float) -> None:
        """Wait until all have said that they are ready.

        Raises what one raised, and EngineDeadError if it died or says nothing for `patience` seconds.
        """
        for worker in self._workers:
            if not worker.spoken.wait(patience):
                raise EngineDeadError(
                    f"{worker.name} (pid {worker.process.pid}) was not ready in {patience:g} s: load the model again."
                )
            if worker.failure != "ready":
                raise worker.error()

    def ended(self, wait: float = 0.0) -> VllmTeachError | None:
        """Return the error of a child that has died by now, or does within `wait` seconds; None if there is none.

        One that noticed in good order that another was gone is not named.
        """
        if wait and self._workers and not any(worker.ended.is_set() for worker in self._workers):
            first = threading.Event()
            self._on_end.append(first.set)
            first.wait(wait)
        gone = [worker for worker in self._workers if worker.ended.is_set()]
        gone.sort(key=lambda worker: worker.process.returncode == 0)
        return gone[0].error() if gone else None

    def when_one_ends(self, action: Callable[[], None]) -> None:
        """Call `action`, in some thread, when a child ends before `stop` is called; at once if one has ended."""
        self._on_end.append(action)
        if any(worker.ended.is_set() for worker in self._workers):
            action()


def _stop(workers: list[_Worker], on_end: list[Callable[[], None]], owner: int) -> None:
    """Let the children end, and kill those that do not. Does nothing in a fork of the process that started them."""
    if os.getpid() != owner:
        return
    on_end.clear()
    for worker in workers:
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
    end = time.monotonic() + _GRACE
    for worker in workers:
        try:
            worker.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # stopped, or in the midst of a long operation
            worker.process.kill()
            worker.process.wait()
