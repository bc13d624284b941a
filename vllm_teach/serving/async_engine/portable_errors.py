"""Errors that are raised in another task, thread or process than the one they happened in."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

from vllm_teach import errors
from vllm_teach.engine.failure import engine_error
from vllm_teach.errors import EngineDeadError, VllmTeachError
from vllm_teach.serving.async_engine.messages import EngineFailed, EngineUpdate, FromEngine

E = TypeVar("E", bound=VllmTeachError)


def portable(error: VllmTeachError) -> VllmTeachError:
    """Return an error with the same message and notes that can be pickled.

    Its class is the nearest one of `vllm_teach.errors`: one that a model's own module defines may need other arguments,
    or be unknown where it arrives.
    """
    kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
    found = kind(str(error))
    for note in getattr(error, "__notes__", ()):
        found.add_note(str(note))
    return found


def make_portable(message: FromEngine) -> FromEngine:
    """Return `message` with `portable` errors."""
    match message:
        case EngineFailed(error=error):
            return EngineFailed(portable(error))
        case EngineUpdate(deltas=deltas) if any(delta.error is not None for delta in deltas):
            sent = (each if each.error is None else replace(each, error=portable(each.error)) for each in deltas)
            return replace(message, deltas=tuple(sent))
    return message


def renewed(error: E) -> E | VllmTeachError:
    """Return `error` anew, with its cause and without a traceback.

    One error may end many requests. Raised again and again, the same object would gather all their tracebacks.
    """
    try:
        found = copy.copy(error)
    except Exception:  # noqa: BLE001 - a class with arguments of its own; the message and the kind remain
        return portable(error)
    found.__cause__ = error.__cause__
    return found


def death(what: str, cause: BaseException) -> EngineDeadError:
    """Return the EngineDeadError "`what` (`cause`): start the engine again.", the traceback's text as a note."""
    if isinstance(cause, EngineDeadError):
        return cause
    plain = cause if isinstance(cause, Exception) else RuntimeError(f"{type(cause).__name__} was raised: {cause}")
    reason = engine_error(what, plain, "start the engine again")
    dead = EngineDeadError(str(reason))
    for note in getattr(reason, "__notes__", ()):
        dead.add_note(note)
    return dead
