"""A child process and all that it starts: none of it outlives this process, and none is left a zombie."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from vllm_teach.errors import ReplicaError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildProcess:
    """A running `command` in a process group of its own, what it prints appended to the file `log`.

    A terminal's Ctrl-C reaches this process alone, which then ends its children in order. When the child has ended,
    what is left of its group is killed before a number could be used again, and reaped if it falls to this process
    (as PID 1 of a container). When this process dies without a word, by SIGKILL say, the kernel sends the child
    `orphan_signal`; that is Linux's only. Create it in a thread that lives as long as this process: it is that
    thread's end which the kernel waits for.

    Raises ReplicaError when the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        orphan_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    process_group=0,
                    preexec_fn=_tie_to_parent(orphan_signal),
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise ReplicaError(f"{command[0]} cannot be started ({error}): see that it is there.") from error
        self.pid = self._process.pid
        self._ended: Future[int] = Future()
        self._ended_for_loop: asyncio.Future[int] | None = None
        self._reaping, self._reaped = threading.Lock(), False
        threading.Thread(target=self._await_end, name=f"await {self.pid}", daemon=True).start()

    async def wait(self) -> int:
        """Return the exit status, negative for a signal's number, when the child and its group have ended.

        One event loop can wait for it.
        """
        if self._ended_for_loop is None:
            # Once, as each that is made stays until the end: two a second, of those who look whether it has come.
            self._ended_for_loop = asyncio.wrap_future(self._ended)
        return await asyncio.shield(self._ended_for_loop)

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the end, for so many seconds at most; return whether it has come."""
        # Not by wait_for, which before Python 3.12 swallows a cancellation that comes together with the end.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the child and its group have ended."""
        return self._ended.done()

    def join(self, seconds: float) -> int:
        """Do as `wait` where no event loop may run on meanwhile; raises TimeoutError after so many seconds."""
        return self._ended.result(seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; to one that has ended, nothing."""
        # Not Popen.send_signal, which would reap the child before its group is ended.
        with self._reaping, suppress(ProcessLookupError):
            if not self._reaped:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the child by SIGKILL; the rest of its group follows."""
        self.send(signal.SIGKILL)

    def _await_end(self) -> None:
        if hasattr(os, "waitid"):
            # While the child is a zombie its number, which is its group's, belongs to no other process.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self._process.wait()
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so by EPERM
            os.killpg(self.pid, signal.SIGKILL)
        with self._reaping:
            status, self._reaped = self._process.wait(), True
        with suppress(ChildProcessError):  # no more of the group are this process's
            while True:
                os.waitpid(-self.pid, 0)
        self._ended.set_result(status)


def describe_end(status: int) -> str:
    """Return "ended with status 1", or "was ended by SIGKILL", for an exit status."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-status}"


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, "" where there is none; of a long log only the end is read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # somebody has removed it
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _tie_to_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return what the child does between fork and exec so that it gets the signal `number` when its parent dies."""
    if sys.platform != "linux":
        return None
    # Looked up here: after a fork, a library's loader may be locked by a thread that the child does not have.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return tie
