"""How an exception becomes the typed error of a request, and how a value is shown in a message."""

from __future__ import annotations

import traceback

from vllm_teach.errors import EngineError, OutOfMemoryError

# PyTorch has a class for a device's memory only, and CUDA's libraries have none.
_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def engine_error(what: str, cause: Exception, advice: str) -> EngineError:
    """Return the EngineError "`what` (`cause`): `advice`."; one that is an EngineError already is returned as it is.

    Where memory ran out, what is returned is an OutOfMemoryError.

    The error is kept in outputs, so its causes give up their tracebacks: these would keep the tensors of the frames
    they point to. The traceback's text is attached as a note.
    """
    text = "".join(traceback.format_exception(cause))
    pending: list[BaseException | None] = [cause]
    seen: set[int] = set()
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.with_traceback(None)
            pending += [error.__cause__, error.__context__]
    if isinstance(cause, EngineError):
        return cause
    kind = OutOfMemoryError if is_out_of_memory(cause) else EngineError
    failure = kind(f"{what} ({shown(cause, 300)}): {advice}.")
    failure.__cause__ = cause
    failure.add_note(text)
    return failure


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device's or the host's memory ran out."""
    if isinstance(error, MemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in shown(error, 10_000) for phrase in _NO_MEMORY)


def shown(value: object, most: int = 80) -> str:
    """Return `value`'s repr for a message, its middle left out where it is longer than `most` characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of 4,301 digits has none, say; the message is about something else
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 20]}...{text[-17:]}"
