"""A small streaming server that stands for a replica: `python fake_replica.py --port PORT [--refuse-when FILE]`.

Streams last until POST /release, so tests see states and not times.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web


class FakeReplica:
    def __init__(self) -> None:
        self.running = self.requests = 0
        self.connections: set[int] = set()
        self.health = 200
        self.released = asyncio.Event()
        self.next: asyncio.Queue[int | None] = asyncio.Queue()
        self.given = 0

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """ "first" now, "last" when released."""
        response = web.StreamResponse(headers={"X-Replica": str(os.getpid())})
        self.running += 1
        try:
            await response.prepare(request)
            await response.write(b"first\n")
            await self.released.wait()
            await response.write(b"last\n")
            await response.write_eof()
        finally:
            self.running -= 1
        return response

    async def pieces(self, request: web.Request) -> web.StreamResponse:
        """A line for each POST /next, until the release."""
        response = web.StreamResponse()
        await response.prepare(request)
        while (number := await self.next.get()) is not None:
            await response.write(f"piece {number}\n".encode())
        await response.write_eof()
        return response

    async def whole(self, request: web.Request) -> web.Response:
        """An answer that is not streamed, when released."""
        self.running += 1
        try:
            await self.released.wait()
        finally:
            self.running -= 1
        return web.json_response({"pid": os.getpid()})

    async def short(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.requests += 1
        self.connections.add(request.transport.get_extra_info("peername")[1])
        body = await request.read()
        return web.json_response({"pid": os.getpid(), "bytes": len(body), "headers": dict(request.headers)})

    async def die(self, request: web.Request) -> web.Response:
        """Take the request, and end without an answer."""
        await request.read()
        os.kill(os.getpid(), signal.SIGKILL)
        return web.Response()

    async def give_next(self, request: web.Request) -> web.Response:
        self.given += 1
        self.next.put_nowait(self.given)
        return web.Response()

    async def release(self, request: web.Request) -> web.Response:
        self.released.set()
        self.next.put_nowait(None)
        return web.Response()

    async def sicken(self, request: web.Request) -> web.Response:
        self.health = 503
        return web.Response()

    async def state(self, request: web.Request) -> web.Response:
        state: dict[str, Any] = {"pid": os.getpid(), "running": self.running, "requests": self.requests}
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES")
        environment = {name: os.environ.get(name) for name in names}
        return web.json_response({**state, "connections": len(self.connections), "environment": environment})

    async def say_health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/next", self.give_next)
        for path in ("stream", "pieces", "whole", "short", "die", "release", "sicken"):
            app.router.add_post(f"/{path}", getattr(self, path))
        app.router.add_get("/state", self.state)
        app.router.add_get("/short", self.short)
        app.router.add_get("/health", self.say_health)
        return app


async def create() -> web.Application:
    return FakeReplica().app()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--refuse-when", type=Path)
    arguments = parser.parse_args()
    if arguments.refuse_when is not None and arguments.refuse_when.exists():
        print("the fake refuses to start")
        sys.exit(3)
    web.run_app(
        create(), host="127.0.0.1", port=arguments.port, handler_cancellation=True, shutdown_timeout=60, print=None
    )
