"""Clients that mean harm, or know no better, on a real server: each gets an answer, and nobody else notices."""

import json
import socket
import threading

import httpx
import pytest

URL = "/v1/completions"


@pytest.fixture(scope="module")
def server(make_server):
    return make_server()


@pytest.fixture(autouse=True)
def the_server_is_well_afterwards(server):
    yield
    assert httpx.get(server.url + "/health", timeout=30).status_code == 200
    engine = server.engine
    server.until(lambda: engine.num_running == engine.num_waiting == 0)
    answer = httpx.post(server.url + "/generate", json={"prompt": "The sea", "max_len": 2}, timeout=60)
    assert answer.status_code == 200


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def test_ten_megabytes_are_refused_and_their_sender_hears_it(server):
    body = json.dumps({"prompt": "sea " * 2_500_000})
    assert len(body) > 10_000_000
    headers = {"content-type": "application/json"}
    assert "1048576 bytes" in refused(httpx.post(server.url + URL, content=body, headers=headers, timeout=60), 413)

    def chunks():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536].encode()

    refused(httpx.post(server.url + URL, content=chunks(), headers=headers, timeout=60), 413)


def test_the_longest_prompt_that_is_read_is_too_long_for_the_model(server):
    for prompt in ("a" * 1_000_000, " " * 1_000_000, "\U0001f600" * 80_000, [7] * 300_000, [[5]] * 129):
        answer = httpx.post(server.url + URL, json={"prompt": prompt}, timeout=60)
        refused(answer, 400)
        assert len(answer.content) < 1000


def test_long_prompts_do_not_hold_up_the_event_loop(server):
    """While a megabyte is tokenised the server answers others: so many answers as would not fit otherwise."""
    done = threading.Event()

    def send():
        httpx.post(server.url + "/tokenize", json={"prompt": "ab " * 300_000}, timeout=60)
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    answers = 0
    with httpx.Client() as client:
        while not done.is_set() and answers < 10_000:
            answers += client.get(server.url + "/health", timeout=30).status_code == 200
    thread.join()
    assert answers > 3


def test_a_list_of_wrong_things_is_refused_at_the_first(server):
    for field, value in (
        ("stop", [1] * 300_000),
        ("stop_token_ids", ["a"] * 200_000),
        ("prompt", [1] * 300_000 + ["a"]),
    ):
        answer = httpx.post(server.url + URL, json={"prompt": "a", field: value}, timeout=60)
        assert field in refused(answer, 400)
        assert len(answer.content) < 1000


def test_slow_senders_delay_no_one(make_server):
    server = make_server(body_timeout=1.0)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    slow = [socket.create_connection(server.address, timeout=30) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(head + b'{"prompt": "')
        answer = httpx.post(server.url + "/generate", json={"prompt": "The sea", "max_len": 2}, timeout=30)
        assert answer.status_code == 200
        for connection in slow:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    finally:
        for connection in slow:
            connection.close()


def test_a_storm_of_clients_that_leave_at_once_leaves_nothing(server):
    body = json.dumps({"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    for _ in range(100):
        with socket.create_connection(server.address, timeout=30) as connection:
            connection.sendall(head + body)


def test_a_client_that_reads_nothing_holds_up_no_one(server):
    body = json.dumps({"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 8}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(server.address)
        connection.sendall(head + body)
        answer = httpx.post(server.url + "/generate", json={"prompt": "The sea", "max_len": 5}, timeout=60)
        assert answer.status_code == 200


def test_two_requests_in_one_packet_are_answered_in_turn(server):
    body = json.dumps({"prompt": "The sea", "max_len": 2}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall((head + body) * 2 + last)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.rindex(b'"text"') < answer.index(b'"version"')


def test_a_path_may_be_anything(server):
    for path in ("/v1/models/%00%ff", "/v1/models/..%2f..%2fetc", "/%f0%9f%98%80", "//", "/v1/models/" + "a" * 5000):
        refused(httpx.get(server.url + path, timeout=30), 404)
