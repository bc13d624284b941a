"""Connections that send half a request, or none, or too much of one, or what is no HTTP."""

import contextlib
import json
import socket

import pytest

from vllm_teach.serving.http.bounded_protocol import MOST_AHEAD, MOST_HEADER_BYTES
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


@pytest.mark.parametrize(
    ("first", "then"),
    [(GET, b"\r\n"), (GET[:-2] + b"content-length: 9\r\n\r\n", b"a"), (b"POST /nothing HTTP/1.1\r\n\r\n", b"\r\n")],
)
def test_what_begins_no_request_does_not_stop_the_clock(impatient, first, then):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(first)
        assert read_answer(connection)[0] in (200, 404)
        connection.sendall(then)
        assert connection.recv(100) == b""


def test_who_is_far_ahead_of_the_answers_gets_some_and_then_the_connection_ends(impatient):
    asked = 10 * MOST_AHEAD
    answers = b""
    with socket.create_connection(impatient.address, timeout=30) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(GET * asked)
        while piece := connection.recv(65536):
            answers += piece
    assert 0 < answers.count(b'{"status":"ok"}') < asked


def test_who_is_a_little_ahead_gets_all(impatient):
    answers = b""
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(GET * MOST_AHEAD)
        while answers.count(b'{"status":"ok"}') < MOST_AHEAD:
            answers += connection.recv(65536)


def test_who_does_not_read_the_answer_is_cut_and_the_request_aborted(serve_scripted, says):
    running = serve_scripted([[says("x" * 50_000)] * 2000], ServerSettings(send_timeout=0.2))
    body = json.dumps({"prompt": "A", "stream": True}).encode()
    with socket.create_connection(running.address, timeout=30) as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"  # and no more: its 100 MB stay where they are
        running.until(lambda: running.engine.streams[0].closed.is_set())
        assert not running.call(lambda: running.server.server_state.connections)


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


POST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "head", [b"GET /health HTTP/1.1\r\nx-a: ", b"GET /", CHUNKED + b"0\r\nx-a: ", CHUNKED + b"1;a="]
)
def test_headers_without_end_are_refused_and_not_kept(impatient, head):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(head)
        with contextlib.suppress(ConnectionError):  # the server has closed it, or does while this writes
            for _ in range(1000):
                connection.sendall(b"a" * 10_000)
            pytest.fail("ten megabytes of headers were taken")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(12) in (b"", b"HTTP/1.1 431")


def test_headers_that_are_a_little_too_large_are_told_so(impatient):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-a: " + b"a" * MOST_HEADER_BYTES)
        impatient.until(
            lambda: any(each._num_bytes > MOST_HEADER_BYTES for each in impatient.server.server_state.connections)
        )
        connection.sendall(b"a")
        status, body = read_answer(connection)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")


def test_a_large_body_in_small_chunks_is_no_header(impatient):
    body = json.dumps({"prompt": "A" * 40_000, "max_tokens": 1}).encode()
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        status, answer = read_answer(connection)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_what_is_no_http_waits_for_the_answer_to_what_came_before_it(impatient):
    body = json.dumps({"prompt": "The sea", "max_tokens": 50, "ignore_eos": True}).encode()
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body + b"no HTTP\r\n\r\n")
        assert read_answer(connection)[0] == 200
        assert connection.recv(100) == b""


def test_an_upgrade_that_loses_the_body_is_told_so_and_the_connection_ends(impatient):
    """As Java's client asks for it with its first request. The parser passes neither its body on nor a further one."""
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(POST + upgrade + b"content-length: 15\r\n\r\n" + b'{"prompt": "A"}')
        status, body = read_answer(connection)
        assert (status, "'Upgrade'" in body["error"]["message"]) == (400, True)
        assert connection.recv(100) == b""
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(GET[:-2] + upgrade + b"\r\n")
        assert read_answer(connection) == (200, {"status": "ok"})
        assert connection.recv(100) == b""


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_has_openais_error_object(impatient, sent):
    with socket.create_connection(impatient.address, timeout=30) as connection:
        connection.sendall(sent)
        status, body = read_answer(connection)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
