"""Every error as HTTP says it and OpenAI's clients read it: a status, headers and {"error": {...}}.

| what happened                                  | status | `type`                | `code`                     |
|------------------------------------------------|--------|-----------------------|----------------------------|
| a field is wrong or not known, the JSON broken | 400    | invalid_request_error | null                       |
| the prompt is too long                         | 400    | invalid_request_error | context_length_exceeded    |
| no key, or a wrong one                         | 401    | invalid_request_error | invalid_api_key            |
| no such model, no such path                    | 404    | invalid_request_error | model_not_found, not_found |
| not with this method                           | 405    | invalid_request_error | method_not_allowed         |
| the body, or the whole request, takes too long | 408    | timeout_error         | request_timeout            |
| the body is too large                          | 413    | invalid_request_error | body_too_large             |
| the body is no JSON by its content type        | 415    | invalid_request_error | unsupported_content_type   |
| the queue is full                              | 429    | rate_limit_error      | queue_full                 |
| the headers are too large                      | 431    | invalid_request_error | headers_too_large          |
| the request failed in the engine               | 500    | server_error          | engine_error               |
| the engine is dead, or the server is stopping  | 503    | server_error          | engine_dead                |

The official client repeats by itself what ends in 408, 429 or 5xx. After 429 that is meant: `Retry-After` says when,
and `Retry-After-Ms`, which that client prefers, spreads those who wait, so that they do not come back all at once.
After a timeout it would add to the very load that caused it, hence `x-should-retry: false`.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from vllm_teach.engine.failure import shown
from vllm_teach.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    VllmTeachError,
)

INVALID = "invalid_request_error"
NO_RETRY = {"x-should-retry": "false"}


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words; `param` is the field that did."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(VllmTeachError):
    """An error that only HTTP knows, with its `status`, `code`, `param` and `headers`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.type, self.headers = status, code, param, type, headers or {}


@dataclass(frozen=True)
class HttpFailure:
    """An error as it goes out."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return OpenAI's error object as JSON. Half of a surrogate pair, which is no text, is escaped in it."""
        message = self.message.encode("utf-8", "backslashreplace").decode()
        param = None if self.param is None else self.param.encode("utf-8", "backslashreplace").decode()
        detail = {"message": message, "type": self.type, "param": param, "code": self.code}
        return json.dumps({"error": detail}, ensure_ascii=False).encode()

    def response(self) -> Response:
        """Return the answer."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def describe_error(error: Exception, retry_after: float = 1.0) -> HttpFailure:
    """Return what a client is told of `error`; nothing of one that is not ours, but that it happened."""
    message, code = str(error), None
    match error:
        case ApiError():
            return HttpFailure(error.status, message, error.type, error.code, error.param, error.headers)
        case InvalidArgumentError():
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            return HttpFailure(400, message, INVALID, code, _param(message))
        case QueueFullError():
            milliseconds = round(1000 * retry_after * random.uniform(0.5, 1.5))
            headers = {"retry-after": str(math.ceil(retry_after)), "retry-after-ms": str(milliseconds)}
            return HttpFailure(429, message, "rate_limit_error", "queue_full", headers=headers)
        case RequestTimeoutError():
            return HttpFailure(408, message, "timeout_error", "request_timeout", headers=dict(NO_RETRY))
        case EngineDeadError():
            return HttpFailure(503, message, "server_error", "engine_dead")
        case VllmTeachError():
            code = "engine_error" if isinstance(error, EngineError) else "internal_error"
            return HttpFailure(500, message, "server_error", code)
    return HttpFailure(500, "the server failed on this request: its log says why.", "server_error", "internal_error")


def describe_validation(errors: Sequence[dict[str, Any]]) -> ApiError:
    """Return the error for what pydantic found wrong with a request: the first of it, in one sentence."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    path = str(place[0]) if place else ""
    for part in place[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    value = shown(first.get("input"))
    match first["type"]:
        case "json_invalid":
            # The place is a position in the text.
            return ApiError(f"the body is no valid JSON ({first['ctx']['error']} at character {place[0]}): correct it.")
        case "missing" if not path:
            return ApiError("the body is empty: send a JSON object.")
        case "missing":
            return ApiError(f"{path} is missing: give it.", param=path)
        case "extra_forbidden":
            return ApiError(f"{path}={value} is not a field that this server knows: leave it out.", param=path)
        case "value_error" if not path:  # of fields that do not fit together; it begins with the name of one
            reason = str(first["ctx"]["error"])
            return ApiError(f"{reason}.", param=reason.split()[0])
        case "value_error":
            reason = str(first["ctx"]["error"])
        case _:
            reason = first["msg"][:1].lower() + first["msg"][1:]
    if not path:
        return ApiError(f"the body is {value}, which is not valid: send a JSON object.")
    return ApiError(f"{path}={value} is not valid: {reason}.", param=path)


def _param(message: str) -> str | None:
    """Return the argument that a message of the house style, "name=value is not valid: ...", is about."""
    found = re.match(r"(\w+)=", message)
    return found[1] if found else None
