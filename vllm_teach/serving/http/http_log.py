"""Names each request, counts its answer, and answers what nobody foresaw."""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_teach.serving.http.http_errors import describe_error
from vllm_teach.serving.http.request_ids import new_id
from vllm_teach.serving.http.service import Service

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class HttpLog:
    """ASGI middleware, the outermost: each answer has an `x-request-id`, the client's own if it sent one.

    OpenAI's clients show it with an error, and the log has it with what was not foreseen. The metrics count answers by
    method, route and status, where the route is its template, so that a client cannot make up series without end.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on to the app."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        name = asked if _NAME.fullmatch(asked) else new_id("req")
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = name
                self._count(scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except Exception as error:
            if begun:  # the server cuts the connection: nobody takes half an answer for a whole one
                raise
            logger.exception("request %s failed", name)
            self.service.count_error(error)
            await describe_error(error).response()(scope, receive, send_named)

    def _count(self, scope: Scope, status: int) -> None:
        if self.service.metrics is not None:
            route = getattr(scope.get("route"), "path", "unknown")
            self.service.metrics.on_response(scope["method"], route, status)
