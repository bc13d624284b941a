"""What the workers of the tests do: functions that `WorkerProcesses` calls by name."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from vllm_teach.errors import ModelLoadError


def wait(ready: Callable[[], None]) -> None:
    ready()
    time.sleep(600)


def never_ready(ready: Callable[[], None]) -> None:
    time.sleep(600)


def chatter(ready: Callable[[], None], lines: int) -> None:
    """Print more than a pipe holds, before and after the word that is expected."""
    for _ in range(lines):
        print("ready? not yet " * 20)
    os.system("echo a child of the child prints, too")
    ready()
    for _ in range(lines):
        print("ready " * 20)
    time.sleep(600)


def refuse(ready: Callable[[], None], text: str) -> None:
    raise ModelLoadError(text)


def stumble(ready: Callable[[], None]) -> None:
    raise ZeroDivisionError("by nothing")


def die(ready: Callable[[], None], number: int) -> None:
    os.kill(os.getpid(), number)


def die_later(ready: Callable[[], None], file: str) -> None:
    """Be ready; then die by SIGKILL when `file` is there."""
    ready()
    while not Path(file).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(ready: Callable[[], None]) -> None:
    ready()
