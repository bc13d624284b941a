"""Bodies that are too large or too slow."""

import asyncio
import json

import pytest

from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.http.settings import AppSettings

BODY = json.dumps({"prompt": "A" * 50}).encode()


def post(engine, receive, headers=(), **settings):
    """Send `POST /generate` to an app and return the messages that it sent."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": list(headers), "query_string": b""}
    asyncio.run(create_app(engine, AppSettings(**settings))(scope, receive, send))
    return sent


def test_a_body_of_just_the_limit_is_taken_and_one_byte_more_is_not(scripted, says):
    ask, engine = scripted([says("x", finish="stop")], max_body_bytes=len(BODY))
    assert ask("POST", "/generate", BODY).status == 200
    answer = ask("POST", "/generate", BODY + b" ")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert len(engine.submitted) == 1


@pytest.mark.parametrize(
    "headers", [{}, {"content-length": "5"}, {"content-length": "x"}, {"content-length": "9" * 30}]
)
def test_a_body_is_counted_as_it_comes_whatever_it_says_of_itself(scripted, headers):
    ask, engine = scripted(max_body_bytes=100)
    parts = [b'{"prompt": "', *[b"A" * 30] * 5, b'"}']
    assert ask("POST", "/generate", parts=parts, headers=headers).status == 413
    assert engine.submitted == []


@pytest.mark.parametrize(("sent", "read"), [(10, 10), (1000, 17)])
def test_too_much_is_read_on_to_its_end_so_that_its_sender_hears_the_answer_but_not_for_ever(scripted, sent, read):
    calls = []

    async def receive():
        calls.append(True)
        return {"type": "http.request", "body": b"A" * 100, "more_body": len(calls) < sent}

    start, _ = post(scripted()[1], receive, max_body_bytes=100)
    assert start["status"] == 413
    assert len(calls) == read


@pytest.mark.parametrize(
    "headers", [[(b"content-length", b"5000")], [(b"content-length", b"200"), (b"expect", b"100-continue")]]
)
def test_a_giant_by_its_own_word_and_one_that_asks_first_are_not_read_at_all(scripted, headers):
    async def receive():
        raise AssertionError("the body was asked for")

    assert post(scripted()[1], receive, headers, max_body_bytes=100)[0]["status"] == 413


def test_a_slow_body_is_408_and_its_sender_is_not_to_retry(scripted):
    first = [b"{"]

    async def receive():
        if not first:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": first.pop(), "more_body": True}

    start, body = post(scripted()[1], receive, body_timeout=0.05)
    assert start["status"] == 408
    headers = dict(start["headers"])
    assert headers[b"x-should-retry"] == b"false"
    assert headers[b"connection"] == b"close"
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"


def test_a_client_that_leaves_while_it_sends_gets_no_answer(scripted):
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    assert post(scripted()[1], receive) == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_has_no_body_is_not_held_up(scripted, method):
    ask, _ = scripted(body_timeout=0.01)
    assert ask(method, "/health").status == 200
