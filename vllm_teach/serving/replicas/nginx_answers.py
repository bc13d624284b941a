"""What nginx before several replicas says itself, as OpenAI's error object, in the words of its configuration.

| nginx's own error                                       | status | `type`                | `code`            |
|---------------------------------------------------------|--------|-----------------------|-------------------|
| a request that cannot be understood                     | 400    | invalid_request_error | null              |
| `/metrics`, which each replica has for itself           | 404    | invalid_request_error | not_found         |
| the body is too large                                   | 413    | invalid_request_error | body_too_large    |
| a header is too large, or too many are                  | 431    | invalid_request_error | headers_too_large |
| the replica went down with the request, or none is left | 502    | server_error          | replica_down      |
| no connection is left, or the disk is full              | 503    | server_error          | balancer_failed   |
| the replica was silent for too long                     | 504    | timeout_error         | replica_timeout   |

A request whose first line cannot be read has no address, and gets nginx's own page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_INVALID = "invalid_request_error"
_MOST_ADDRESSES = 16  # nginx takes no parameter of more than 4096 characters


def own_answers(max_body_bytes: int, read_timeout: float, replica_ports: Sequence[int]) -> str:
    """Return the directives of a `server` that give these answers, each named by the variable `$named`."""
    each = [f"http://127.0.0.1:{port}/metrics" for port in replica_ports]
    each[_MOST_ADDRESSES:] = ["..."] if len(each) > _MOST_ADDRESSES else []
    metrics = f"each replica has metrics of its own: read {', '.join(each)}."
    unreadable = "this is no valid HTTP request: correct it."
    large = f"the body has more than {max_body_bytes} bytes: send less at once."
    headers = "the headers are too large: send less in them."
    gone = "the replica that had this request went down, or none can be reached: send it again."
    failed = "nginx has no connection left for this request, or no disk (error.log says why): send it again."
    slow = f"the replica was silent for {read_timeout:g} s: ask for fewer tokens, or stream them."
    answers = [
        _answer("= /metrics", 404, metrics, _INVALID, "not_found"),
        _error(400, 400, unreadable, _INVALID, None),
        _error(413, 413, large, _INVALID, "body_too_large"),
        _error(494, 431, headers, _INVALID, "headers_too_large"),
        _error(500, 503, failed, "server_error", "balancer_failed", {"Retry-After": "1"}),
        _error(502, 502, gone, "server_error", "replica_down", {"Retry-After": "1"}),
        # The official client repeats a 504 by itself, which adds to the load of who is too slow already.
        _error(504, 504, slow, "timeout_error", "replica_timeout", {"X-Should-Retry": "false"}),
    ]
    return "\n\n".join(answers)


def _error(
    own: int, status: int, message: str, kind: str, code: str | None, headers: Mapping[str, str] | None = None
) -> str:
    """Return what answers with `status` where nginx would show its page for the error `own`."""
    location = f"@error_{own}"
    return f"        error_page {own} ={status} {location};\n{_answer(location, status, message, kind, code, headers)}"


def _answer(
    location: str, status: int, message: str, kind: str, code: str | None, headers: Mapping[str, str] | None = None
) -> str:
    named = {"X-Request-ID": "$named", **(headers or {})}
    lines = [f"add_header {name} {value} always;" for name, value in named.items()]
    error = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    text = error.replace("'", r"\'")
    lines.append(f"return {status} '{text}';")
    body = "\n            ".join(lines)
    return f"""\
        location {location} {{
            {body}
        }}"""
