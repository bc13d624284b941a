"""Runs the app on a socket: what it is bound to, how its connections are treated, and what the process needs for it."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from vllm_teach.engine.field_checks import check_flag, check_number, take_plain_numbers
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.http.bounded_protocol import protocol_with
from vllm_teach.serving.http.draining_server import DrainingServer
from vllm_teach.serving.http.settings import AppSettings

if TYPE_CHECKING:
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics

# Longer than a load balancer keeps an idle connection (nginx: 60 s): else one is closed here while a request is on its
# way, which then fails, as a balancer may not send it twice.
_KEEP_ALIVE = 75


@dataclass(frozen=True)
class ServerSettings:
    """How the server treats its connections, each checked on construction: InvalidArgumentError names the bad one.

    Told to end, it waits `drain_timeout` seconds for what is in flight; what is left ends in an error. A connection
    that does not send its headers within `header_timeout` seconds is closed, and one that takes nothing of its answer
    for `send_timeout`. `access_log` prints a line a request.
    """

    drain_timeout: float = 30.0
    header_timeout: float = 15.0
    send_timeout: float = 60.0
    access_log: bool = False

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_number("drain_timeout", self.drain_timeout, 0, hint="use seconds from 0")
        check_number("header_timeout", self.header_timeout, 0, open_low=True, hint="use seconds above 0")
        check_number("send_timeout", self.send_timeout, 0, open_low=True, hint="use seconds above 0")
        check_flag("access_log", self.access_log)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to `port` of `host` (0: a free one) that does not listen yet: who comes is turned away.

    Raises InvalidArgumentError, which says why, when it cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            if sys.platform != "win32":  # where it means something else
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"port={port} of host={host!r} cannot be served on ({reason}): choose another one."
        raise InvalidArgumentError(message) from error
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def address_of(sock: socket.socket) -> str:
    """Return the URL of the server on `sock`."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end on the fastest event loop that is installed."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(work)


async def serve(
    engine: AsyncLLMEngine,
    sock: socket.socket,
    app_settings: AppSettings | None = None,
    server_settings: ServerSettings | None = None,
    metrics: ServerMetrics | None = None,
    *,
    on_serving: Callable[[DrainingServer], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Start `engine`, serve it on `sock` until SIGTERM or SIGINT, let what is in flight finish, and stop it.

    A second signal ends everything at once. `on_serving` is called when requests are taken, with the server, whose
    `end` does what a signal does: outside the main thread, which alone gets signals, that is the way. `report` is told
    what its end waits for.
    """
    settings = server_settings or ServerSettings()
    with sock:
        try:
            ready = await engine.start()
            if metrics is not None:
                metrics.on_ready(ready)
            app = create_app(engine, app_settings, metrics)
            config = uvicorn.Config(
                app,
                http=protocol_with(settings.header_timeout, settings.send_timeout),
                ws="none",
                lifespan="on",
                log_level="info" if settings.access_log else "warning",
                access_log=settings.access_log,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
            )
            _raise_open_files()
            with _old_objects_left_alone():
                await DrainingServer(config, engine, settings.drain_timeout, on_serving, report).serve(sockets=[sock])
        finally:
            await engine.stop()


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep what is there now out of the garbage collector's search meanwhile.

    PyTorch and transformers are a million objects: each full collection would go through them all, and for some tenths
    of a second nobody would get an answer.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _raise_open_files() -> None:
    """Allow as many open files as the system lets us: each connection is one, and many a system begins at 1,024."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
