"""Lets in who has the key."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_teach.serving.http.http_errors import ApiError, describe_error
from vllm_teach.serving.http.service import Service

# What load balancers and Prometheus ask, who have no key, and what tells nothing of anybody's requests.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/openapi.json"})


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless a request has `Authorization: Bearer <key>`, before its body is read.

    Digests are compared, in a time that does not depend on where they differ, so that neither the key's letters nor its
    length can be found out by measuring.
    """

    def __init__(self, app: ASGIApp, service: Service, key: str) -> None:
        self.app, self.service = app, service
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on to the app."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(given, self._digest):
            await self.app(scope, receive, send)
            return
        what = "is not the key of this server" if given else "is missing"
        error = ApiError(
            f"the API key {what}: send it as 'Authorization: Bearer <key>'.",
            401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        self.service.count_error(error)
        await describe_error(error).response()(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
