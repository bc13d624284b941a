"""A client that goes away takes its requests with it, wherever they are."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.http.disconnect import unless_disconnected

COMPLETION = {"prompt": ["A", "B"], "max_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_aborts_all_its_requests(scripted, says, hold, ask, stream, begun):
    first = [{}, says("a"), hold] if begun else [hold]
    _, engine = scripted(first, [hold])
    app = create_app(engine)

    async def leave():
        gone = asyncio.Event()
        asking = asyncio.create_task(ask(app, "POST", "/v1/completions", {**COMPLETION, "stream": stream}, gone=gone))
        while len(engine.streams) < 2:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(stream.closed.is_set() for stream in engine.streams)
        gone.set()
        return await asyncio.wait_for(asking, 5)

    answer = asyncio.run(leave())
    assert all(stream.closed.is_set() for stream in engine.streams)
    assert answer.status == (200 if stream and begun else 499)
    assert bool(answer.parts) == (stream and begun), "what is there is sent at once"


def test_a_client_that_does_not_read_and_leaves_aborts_too(scripted, says, hold):
    _, engine = scripted([{}, says("a"), says("b"), hold])
    app = create_app(engine)

    async def leave():
        gone, stuck = asyncio.Event(), asyncio.Event()
        pending = [b'{"prompt": "A", "stream": true}']

        async def receive():
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body":
                stuck.set()
                await asyncio.Event().wait()  # its buffers are full

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "query_string": b""}
        asking = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(stuck.wait(), 5)
        gone.set()
        await asyncio.wait_for(asking, 5)

    asyncio.run(leave())
    assert engine.streams[0].closed.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_aborts(scripted, hold, ask, says, stream):
    _, engine = scripted([{}, says("a"), hold])
    app = create_app(engine)

    async def end():
        asking = asyncio.create_task(ask(app, "POST", "/generate", {"prompt": "A", "stream": stream}))
        while not engine.streams:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(end())
    assert engine.streams[0].closed.is_set()


def test_work_that_ends_first_is_returned_and_its_error_raised():
    async def check():
        async def never():
            await asyncio.Event().wait()

        async def work():
            return 5

        async def fail():
            raise ValueError("its own")

        assert await unless_disconnected(never, work()) == 5
        with pytest.raises(ValueError, match="its own"):
            await unless_disconnected(never, fail())

    asyncio.run(check())


def test_work_is_cancelled_and_waited_for():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def check():
        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await unless_disconnected(receive, work())

    asyncio.run(check())
    assert ended == [True]


@pytest.mark.parametrize("stream", [False, True])
def test_on_a_real_server_an_abandoned_request_frees_its_blocks(tiny_server, stream):
    import json
    import socket

    engine = tiny_server.engine
    body = json.dumps({"prompt": "The sea", "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(tiny_server.address, timeout=30) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        tiny_server.until(lambda: engine.num_running == 1)
    tiny_server.until(lambda: engine.num_running == engine.num_waiting == 0)
