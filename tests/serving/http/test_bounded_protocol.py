"""Connections that send half a request, or none, or what is no HTTP."""

import json
import socket

import pytest

from vllm_teach.serving.http.server import ServerSettings

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def impatient(make_server):
    return make_server(server_settings=ServerSettings(header_timeout=1.0), body_timeout=1.0)


def read_answer(connection: socket.socket) -> tuple[int, dict]:
    """The status and JSON of one answer."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(4096)
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += connection.recv(4096)
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("sent", [b"", b"POST /generate HT", b"POST /generate HTTP/1.1\r\nhost: x\r\nx-a: b"])
def test_a_connection_without_whole_headers_is_closed(impatient, sent):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


def test_half_of_a_second_request_is_closed_too(impatient):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200
        connection.sendall(GET[:20])
        assert connection.recv(100) == b""


def test_a_body_that_does_not_come_is_408_and_the_connection_is_closed(impatient):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        connection.sendall(head)
        status, body = read_answer(connection)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert connection.recv(100) == b""


def test_a_request_in_time_is_answered_however_long_that_takes(impatient):
    body = json.dumps({"prompt": "The sea", "max_tokens": 300, "ignore_eos": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    with socket.create_connection(impatient.address, timeout=60) as connection:
        connection.sendall(head + body)
        status, answer = read_answer(connection)
        assert status == 200
        assert answer["text"]


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_has_openais_error_object(impatient, sent):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(sent)
        status, body = read_answer(connection)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
