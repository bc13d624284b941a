"""What runs in a child of `worker_processes`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from importlib import import_module
from typing import BinaryIO

from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.parallel.told_errors import tell_error


def main() -> None:
    """Run the function that standard input names, as `WorkerProcesses` says; end when standard input does."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not be taken for our word
    said = False

    def say(word: str) -> None:
        nonlocal said
        said = True
        output.write(f"{word}\n".encode())

    try:
        job = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
        entry, arguments = _read(job)
        module, _, function = entry.partition(":")
        getattr(import_module(module), function)(lambda: say("ready"), *arguments)
    except EngineDeadError:
        _exit(0)  # the others are gone, the driver first of all
    except BaseException as error:  # noqa: BLE001 - the parent hears of it, or reads it on standard error
        if said:
            traceback.print_exc()
        else:
            say(tell_error(error))
        _exit(1)
    _exit(0)


def _read(job: bytes) -> tuple[str, tuple]:
    try:
        return pickle.loads(job)
    except Exception as error:  # whatever the import of the object's module raises
        raise InvalidArgumentError(
            f"what was sent to this process cannot be read here ({error}): use objects of importable classes, and none "
            "that a notebook or a script defines itself."
        ) from error


def _end_with_parent(lifeline: BinaryIO) -> None:
    lifeline.read()
    _exit(0)


def _exit(code: int) -> None:
    """End at once: what other threads are in the midst of, a collective operation say, may never end."""
    sys.stderr.flush()
    os._exit(code)
