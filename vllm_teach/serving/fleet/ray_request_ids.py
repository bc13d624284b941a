"""Names of requests, where Ray gives them."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LeaveRequestIdToRay:
    """ASGI middleware that takes `x-request-id` out of an answer, where it would stand twice.

    Ray's proxy chooses a name where the client has none, hands it to the app in the request's headers, and adds it to
    whatever is answered. So the one that goes out is also the one in the app's log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on to the app."""

        async def send_unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self.app(scope, receive, send_unnamed)
