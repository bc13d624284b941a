"""An engine that says what a test tells it to, a client that speaks ASGI, and a real server in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.outputs import Logprob
from vllm_teach.errors import EngineDeadError, VllmTeachError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.messages import CompletionDelta, EngineReady, RequestDelta
from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.http.draining_server import DrainingServer
from vllm_teach.serving.http.server import ServerSettings, address_of, bind, run, serve
from vllm_teach.serving.http.settings import AppSettings
from vllm_teach.serving.metrics.server_metrics import ServerMetrics

READY = EngineReady("scripted", 64, 300, "float32", "cpu", 8, 16)
HOLD = "hold"  # in a script: wait until the stream is closed
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


class LetterTokenizer:
    """A character is the token of its number, as long as that is below 256."""

    stop_token_ids = (256,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


class ScriptedStream:
    def __init__(self, request_id: str, script: list[Any]) -> None:
        self.request_id, self.script, self.closed = request_id, iter(script), asyncio.Event()

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self

    async def __anext__(self) -> RequestDelta:
        await asyncio.sleep(0)
        step = next(self.script, None)
        if step is HOLD:
            await self.closed.wait()
        if isinstance(step, Exception):
            raise step
        if step is None or self.closed.is_set():
            raise StopAsyncIteration
        return RequestDelta(self.request_id, **step) if isinstance(step, dict) else step

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class ScriptedEngine:
    """Stands for `AsyncLLMEngine`: `scripts` are what streams bring, or the errors that `submit` raises, in turn."""

    scripts: list[Any] = field(default_factory=list)
    dead: str | None = None
    ready: EngineReady = READY
    tokenizer: Any = field(default_factory=LetterTokenizer)
    submitted: list[tuple[Any, ...]] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)

    def submit(self, prompt, params, *, request_id=None, priority=0, whole=False):
        script = self.scripts.pop(0)
        if isinstance(script, VllmTeachError):
            raise script
        self.submitted.append((prompt, params, request_id, priority))
        self.streams.append(ScriptedStream(request_id, script))
        return self.streams[-1]

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)

    async def start(self) -> EngineReady:
        return self.ready

    async def stop(self) -> None:
        for stream in self.streams:
            await stream.aclose()


def _says(text: str, index: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    new = CompletionDelta(index, text, tuple(text.encode()), finish_reason=finish, **more)
    return {"completions": (new,), "finished": finish is not None}


def _ranked(*choices: tuple[str, float, int]) -> dict[int, Logprob]:
    return {ord(text[0]): Logprob(logprob, rank, text) for text, logprob, rank in choices}


@dataclass
class Answered:
    """What an app answered; `parts` are the pieces of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        [(key, error)] = self.json().items()
        assert key == "error"
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    def events(self) -> list[Any]:
        """The JSON of each event, and what is no JSON as it is."""
        assert self.body.endswith(b"\n\n")
        lines = self.body.decode().split("\n\n")[:-1]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [json.loads(line[6:]) if line[6:].startswith("{") else line[6:] for line in lines]


async def _ask(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    gone: asyncio.Event | None = None,
    parts: list[bytes] | None = None,
) -> Answered:
    """Send one request to `app`: `body` as JSON (or bytes as they are), or in `parts`. The client leaves at `gone`."""
    answered = Answered()
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    pending = [content] if parts is None else list(parts)
    sent = {"content-type": "application/json"} | (headers or {})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if pending:
            return {"type": "http.request", "body": pending.pop(0), "more_body": bool(pending)}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["body"]:
            answered.parts.append(message["body"])

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 9),
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()],
        "state": {},
    }
    await app(scope, receive, send)
    return answered


Ask = Callable[..., Answered]


@pytest.fixture
def says() -> Callable[..., dict[str, Any]]:
    """A step of a script: a completion goes on by a text, a token a character."""
    return _says


@pytest.fixture
def ranked() -> Callable[..., dict[int, Logprob]]:
    """The log-probabilities of a position, from (text, log-probability, rank), the chosen token first."""
    return _ranked


@pytest.fixture
def hold() -> str:
    """A step of a script: wait until the stream is closed."""
    return HOLD


@pytest.fixture
def ask() -> Callable[..., Any]:
    """The ASGI client, a coroutine function: (app, method, path, body, ...) -> Answered."""
    return _ask


@pytest.fixture
def scripted() -> Callable[..., tuple[Ask, ScriptedEngine]]:
    """A maker of (what asks an app, its engine); arguments are the engine's scripts and the app's settings."""

    def make(*scripts: Any, metrics: Any = None, **settings: Any) -> tuple[Ask, ScriptedEngine]:
        engine = ScriptedEngine(list(scripts))
        app = create_app(engine, AppSettings(**settings), metrics)
        return lambda *args, **named: asyncio.run(_ask(app, *args, **named)), engine

    return make


class RunningServer:
    """A server on a free port of loopback, in a thread with an event loop of its own."""

    def __init__(
        self, engine: AsyncLLMEngine, app_settings: AppSettings, server_settings: ServerSettings, metrics: ServerMetrics
    ) -> None:
        self.engine, self.serving = engine, threading.Event()
        self.reports: list[str] = []
        sock = bind("127.0.0.1", 0)
        self.url, self.address = address_of(sock), sock.getsockname()
        settings = (app_settings, server_settings, metrics)

        async def work() -> None:
            self.loop = asyncio.get_running_loop()
            try:
                await serve(engine, sock, *settings, on_serving=self._begin, report=self.reports.append)
            finally:
                self.serving.set()

        self.thread = threading.Thread(target=run, args=(work(),))
        self.thread.start()
        assert self.serving.wait(60)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the event loop's thread."""

        async def work() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(10)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, which is asked in the event loop's thread."""

        async def work() -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(work(), self.loop).result(40)

    def _begin(self, server: DrainingServer) -> None:
        self.server = server
        self.serving.set()

    def close(self) -> None:
        self.server.end()
        self.thread.join(60)
        assert not self.thread.is_alive()


def load_tiny() -> LLM:
    """The tiny model, with a chat template, which its files lack."""
    llm = LLM("tiny", dtype="float32", num_kv_blocks=512)
    llm.tokenizer.hf.chat_template = CHAT_TEMPLATE
    return llm


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The oracle: the same model, used directly."""
    return load_tiny()


@pytest.fixture
def serve_scripted() -> Iterator[Callable[..., RunningServer]]:
    """A maker of servers of scripted engines: (scripts, server's settings, app's settings) -> server."""
    servers = []

    def make(scripts: list[Any], settings: ServerSettings | None = None, **app_settings: Any) -> RunningServer:
        engine, app, metrics = ScriptedEngine(scripts), AppSettings(**app_settings), ServerMetrics("scripted")
        servers.append(RunningServer(engine, app, settings or ServerSettings(), metrics))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def make_server() -> Iterator[Callable[..., RunningServer]]:
    """A maker of servers of the tiny model; all end with the module."""
    servers = []

    def make(server_settings: ServerSettings | None = None, **app_settings: Any) -> RunningServer:
        settings, metrics = AppSettings(**{"served_model_names": ("tiny",), **app_settings}), ServerMetrics("tiny")
        engine = AsyncLLMEngine.of(load_tiny(), on_report=metrics.on_report, on_finished=metrics.on_finished)
        servers.append(RunningServer(engine, settings, server_settings or ServerSettings(), metrics))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def tiny_server(make_server: Callable[..., RunningServer]) -> RunningServer:
    return make_server()
