"""An answer has one name, which is Ray's."""

import asyncio

from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.fleet.ray_request_ids import LeaveRequestIdToRay
from vllm_teach.serving.http.app import create_app


def test_the_apps_name_is_left_out_and_nothing_else():
    app = create_app(AsyncLLMEngine.spawn("tiny"))

    def ask(asgi):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "GET", "path": "/version", "query_string": b"", "headers": []}
        asyncio.run(asgi(scope, receive, send))
        return sent

    named, unnamed = ask(app), ask(LeaveRequestIdToRay(app))
    assert [name for name, _ in named[0]["headers"] if name == b"x-request-id"]
    assert unnamed[0]["headers"] == [each for each in named[0]["headers"] if each[0] != b"x-request-id"]
    assert unnamed[1:] == named[1:]
