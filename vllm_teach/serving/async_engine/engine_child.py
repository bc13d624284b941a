"""What runs in the process that an engine has to itself."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from contextlib import closing
from functools import partial
from inspect import signature
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.message_pipe import MessagePipe
from vllm_teach.serving.async_engine.messages import EngineFailed, StopEngine, ToEngine
from vllm_teach.serving.async_engine.portable_errors import death, make_portable

if TYPE_CHECKING:
    from vllm_teach.engine.llm import LLM

PATIENCE = 5.0  # seconds that a step may go on when nobody waits for it any more


def main() -> None:
    """Load the model that the server names, on standard input, and serve it until the server says stop.

    When the server's process is gone this one ends by itself, also in the midst of a step that does not end.
    """
    # A Ctrl-C, and a service manager's SIGTERM, may come to all processes: the server decides what ends when.
    # Not SIG_IGN for the latter, which would go on to the workers of a tensor-parallel engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_to_server)
    pipe = _take_standard_streams()
    try:
        model, arguments = pipe.receive()
    except EOFError:  # the server died as soon as it had started this process
        return
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="vllm-teach inbox", daemon=True).start()
    # Here, because PyTorch comes with it, and what stands above should be done at once.
    from vllm_teach.serving.async_engine.engine_loop import serve_engine

    serve_engine(partial(_load, model, arguments), model, inbox, lambda message: pipe.send(make_portable(message)))
    pipe.flush()


def _take_standard_streams() -> MessagePipe:
    """Return the pipe that standard input and output are; what is printed from here on goes to standard error."""
    reader, writer = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return MessagePipe(open(reader, "rb"), open(writer, "wb"))


def _load(model: str, arguments: bytes) -> closing[LLM]:
    from vllm_teach.engine.llm import LLM

    try:
        keywords = pickle.loads(arguments)
        signature(LLM).bind(model, **keywords)
    except Exception as error:
        raise InvalidArgumentError(
            f"engine_args cannot be used in the engine's process ({error}): give LLM's keyword arguments, with values "
            "whose classes are in a module, not in a notebook or a script."
        ) from error
    llm = LLM(model, **keywords)
    # PyTorch and transformers are a million objects: each full collection would hold a step up for tenths of a second.
    gc.collect()
    gc.freeze()
    return closing(llm)


def _read(pipe: MessagePipe, inbox: SimpleQueue[ToEngine]) -> None:
    """Bring what the server sends into the inbox: a server never finds the pipe full, however long a step takes."""
    try:
        while True:
            inbox.put(pipe.receive())
    except EOFError:
        inbox.put(StopEngine())
        time.sleep(PATIENCE)
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a message whose class is unknown here, say
        pipe.send(EngineFailed(death("the engine's process cannot read what the server sent", error)))
        inbox.put(StopEngine())


def _leave_to_server(signum: int, frame: FrameType | None) -> None:
    """Do nothing."""
