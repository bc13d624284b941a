"""An error as words that another process can make an error of again: its class, if it is one of ours, and its text."""

from __future__ import annotations

import json

from vllm_teach import errors
from vllm_teach.errors import EngineDeadError, VllmTeachError


def tell_error(error: BaseException) -> str:
    """Return `error` as one line; what is no VllmTeachError becomes an EngineDeadError that shows it."""
    if isinstance(error, VllmTeachError):
        return json.dumps([type(error).__name__, str(error)])
    return json.dumps([EngineDeadError.__name__, f"it could not start ({error!r:.300})."])


def told_error(who: str, told: str) -> VllmTeachError:
    """Return the error that `who` told."""
    kind, text = json.loads(told)
    return getattr(errors, kind, EngineDeadError)(f"{who}: {text}")
