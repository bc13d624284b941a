"""How an exception becomes the typed error of a request."""

from __future__ import annotations

import traceback

from vllm_teach.errors import EngineError


def engine_error(what: str, cause: Exception, advice: str) -> EngineError:
    """Return the EngineError "`what` (`cause`): `advice`."; one that is an EngineError already is returned as it is.

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
    failure = EngineError(f"{what} ({cause!r}): {advice}.")
    failure.__cause__ = cause
    failure.add_note(text)
    return failure
