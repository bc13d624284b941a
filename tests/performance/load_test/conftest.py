"""A small OpenAI-compatible server that does as its requests say, in a thread, on loopback."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class FakeServer:
    """Answers each token with "x"; the field `behave` of a request says what else to do. A word is a token.

    `seen` are the bodies that came, `open` the requests that are open, `most` the most of them at once, `left` those
    whose client hung up. `lends_tokenizer` is whether it has /tokenize, `models` and `max_model_len` what it says,
    unless it says `listing`. `behave` is for requests that do not say it, `health` are the statuses of /health, the
    last one from then on.
    """

    port: int = 0
    behave: str | None = None
    health: list[int] = field(default_factory=lambda: [200])
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: Counter[str | None] = field(default_factory=Counter)
    open: int = 0
    most: int = 0
    left: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lends_tokenizer: bool = True
    models: tuple[str, ...] = ("fake",)
    listing: Any = None
    max_model_len: int | None = None
    words: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def check_health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health[0] if len(self.health) == 1 else self.health.pop(0))

    async def list_models(self, request: web.Request) -> web.Response:
        if self.listing is not None:
            return web.json_response(self.listing)
        entries = [{"id": name, "max_model_len": self.max_model_len} for name in self.models]
        return web.json_response({"object": "list", "data": entries})

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.lends_tokenizer:
            return refusal(404, "not_found_error")
        body = await request.json()
        words = ["<s>", *body["prompt"].split(), "</s>"]  # as some tokenizers do with any text
        return web.json_response({"tokens": [self.number(word) for word in words]})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": " ".join(self.words[token] for token in body["tokens"])})

    def number(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.keys[request.headers.get("Authorization")] += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            asked = body["prompt"] if "messages" not in body else body["messages"][0]["content"]
            assert body["max_tokens"] > 0
            assert body["temperature"] >= 0
            assert body["model"] == "fake"
            assert isinstance(asked, str | list)
        except (ValueError, AssertionError, TypeError, KeyError):
            return refusal(400, "invalid_request_error")
        self.seen.append(body)
        behave, tokens = body.get("behave", self.behave), body["max_tokens"]
        usage = {"prompt_tokens": len(asked.split() if isinstance(asked, str) else asked), "completion_tokens": tokens}
        if behave == "busy":
            return refusal(429, "rate_limit_error")
        if behave == "html":
            return web.Response(text="<html>oops</html>", status=502)
        if behave == "redirect":
            return web.Response(status=307, headers={"Location": str(request.url)})
        if behave == "hang":
            await asyncio.sleep(60)
        if behave == "in turn":  # each takes 20 ms, nobody is served beside it
            async with self.turn:
                await asyncio.sleep(0.02)
        while behave == "twelve at once" and self.most < 12:
            await asyncio.sleep(0.002)
        if behave == "hang up":
            assert request.transport is not None
            request.transport.abort()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x" * tokens, "finish_reason": "length"}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            if number == 2 and behave == "cut":
                assert request.transport is not None
                request.transport.abort()
            if number == 2 and behave == "half":
                return response
            if number == 2 and behave == "fail":
                await response.write(event({"error": {"message": "m", "type": "server_error"}}))
            if number == 2 and behave == "stall":
                await asyncio.sleep(60)
            if behave == "slow":
                await asyncio.sleep(0.01)
            reason = "length" if number == tokens - 1 else None
            await response.write(event({"choices": [{"text": "x", "finish_reason": reason}]}))
        if behave == "no done":
            return response
        if "stream_options" in body:
            await response.write(event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        if behave == "cut at the end":
            assert request.transport is not None
            request.transport.abort()
        if behave == "linger":
            await asyncio.sleep(60)
        return response


def event(body: dict) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def refusal(status: int, kind: str) -> web.Response:
    return web.json_response({"error": {"message": "no", "type": kind}}, status=status)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server in a thread of its own, on a port of loopback's own choice."""
    loop, fake = asyncio.new_event_loop(), FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", fake.list_models)
    app.router.add_get("/health", fake.check_health)
    app.router.add_post("/tokenize", fake.tokenize)
    app.router.add_post("/detokenize", fake.detokenize)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.port = runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
