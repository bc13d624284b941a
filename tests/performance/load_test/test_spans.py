"""Requests that are sent all at once, and the health checks between them."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from vllm_teach.performance.load_test.spans import Spans, measure_spans
from vllm_teach.performance.load_test.target import ServerError, Target

REQUESTS = [([1, 2], 3)] * 5


def test_requests_begin_together_and_health_is_asked_for_meanwhile(server: Any) -> None:
    server.behave = "in turn"
    spans = asyncio.run(measure_spans(Target(server.url), REQUESTS, model="fake", every=0.001))
    assert len(spans.requests) == server.most == 5
    assert spans.seconds >= 5 * 0.0199
    assert max(begin for begin, _ in spans.requests) < min(end for _, end in spans.requests)
    assert len(spans.health) > 1
    assert all(before[1] <= after[0] for before, after in pairwise(spans.health))
    assert spans.slowest_health > 0


def test_a_health_check_that_fails_is_no_quick_one(server: Any) -> None:
    server.behave, server.health = "in turn", [200, 200, 503]
    with pytest.raises(ServerError, match="answers /health with status 503"):
        asyncio.run(measure_spans(Target(server.url), REQUESTS, model="fake", every=0.001))


def test_a_request_that_fails_is_the_error(server: Any) -> None:
    with pytest.raises(ServerError, match="answers /v1/completions with status 400"):
        asyncio.run(measure_spans(Target(server.url), [*REQUESTS, ([1], 0)], model="fake"))


async def measure_beside_a_slow_health_check() -> Spans:
    """One completion, answered when a health check has come; the check is answered after the client has the completion.

    As with a server whose handler computes, but in an order that does not depend on who is faster.
    """
    asked, answered, checks = asyncio.Event(), asyncio.Event(), 0

    async def health(request: web.Request) -> web.Response:
        nonlocal checks
        checks += 1
        if checks > 1:  # the first one only opens a connection
            asked.set()
            await answered.wait()
        return web.json_response({})

    async def complete(request: web.Request) -> web.Response:
        await asked.wait()
        asyncio.get_running_loop().call_later(0.1, answered.set)
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        return await measure_spans(Target(f"http://127.0.0.1:{port}"), [([1, 2], 3)], model="any", every=0.001)
    finally:
        await runner.cleanup()


def test_a_health_check_that_is_open_at_the_end_counts_as_long_as_it_waited() -> None:
    spans = asyncio.run(measure_beside_a_slow_health_check())
    (check,) = spans.health
    assert check[0] < spans.seconds < check[1]
    assert spans.slowest_health == check[1] - check[0]
