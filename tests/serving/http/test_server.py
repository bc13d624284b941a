"""The server told to end, when its clients do not let it."""

import gc
import json
import socket
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.http import draining_server
from vllm_teach.serving.http.request_ids import new_id
from vllm_teach.serving.http.server import ServerSettings, bind, run, serve

STREAM = {"prompt": "A", "stream": True}


def test_a_client_that_never_reads_cannot_keep_the_server_from_ending(serve_scripted, says, monkeypatch):
    monkeypatch.setattr(draining_server, "_LAST_WORDS", 0.1)
    running = serve_scripted([[says("x" * 50_000)] * 2000], ServerSettings(drain_timeout=0.1))
    body = json.dumps(STREAM).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    with socket.create_connection(running.address, timeout=30) as connection:
        connection.sendall(head + body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"  # and no more: its 100 MB stay where they are
        running.server.end()
        running.thread.join(30)
        assert not running.thread.is_alive()
    assert running.engine.streams[0].closed.is_set()


@contextmanager
def in_flight(running, number):
    """Open streams that have begun and do not end by themselves."""
    with httpx.Client(timeout=30) as client, ExitStack() as streams:
        asked = [client.stream("POST", running.url + "/generate", json=STREAM) for _ in range(number)]
        parts = [streams.enter_context(each).iter_raw() for each in asked]
        assert all(next(each) for each in parts)
        yield


def test_told_to_end_it_says_what_it_waits_for_and_told_again_what_it_does_not(serve_scripted, says, hold):
    running = serve_scripted([[says("x"), hold]] * 2, ServerSettings(drain_timeout=600))
    with in_flight(running, 2):
        running.server.end()
        running.until(lambda: running.reports)
        assert running.reports == ["finishing 2 requests (at most 600 s); Ctrl-C or SIGTERM again stops at once."]
        running.server.end()
        running.thread.join(30)
    assert running.reports[1:] == ["stopping without finishing 2 requests."]


@pytest.mark.parametrize("number", [0, 1])
def test_without_time_to_finish_it_says_only_what_it_leaves(serve_scripted, says, hold, number):
    running = serve_scripted([[says("x"), hold]], ServerSettings(drain_timeout=0))
    with in_flight(running, number):
        running.server.end()
        running.thread.join(30)
    assert running.reports == ["stopping without finishing 1 request."] * number


def test_idle_connections_do_not_hold_it_up_and_new_ones_are_turned_away(serve_scripted):
    running = serve_scripted([], ServerSettings(drain_timeout=600))
    with httpx.Client() as client, socket.create_connection(running.address, timeout=30) as silent:
        assert client.get(running.url + "/health").status_code == 200
        running.server.end()
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert running.reports == [], "nothing was in flight"
        assert silent.recv(10) == b""
        with pytest.raises(httpx.ConnectError):
            client.get(running.url + "/health")


def test_who_comes_before_the_model_is_loaded_is_turned_away():
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=30)


def test_a_port_in_use_and_a_host_that_is_none_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidArgumentError, match="already in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    for host in ("no.such.name.invalid", "a" * 300, "\ud800"):
        with pytest.raises(InvalidArgumentError, match="cannot be served on"):
            bind(host, 0)


def test_a_port_where_another_began_to_listen_meanwhile_is_refused(scripted):
    """Two servers that load their models at the same time can both bind it."""
    _, engine = scripted()
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = bind("127.0.0.1", port)
        first.listen()
        with pytest.raises(InvalidArgumentError, match=f"port={port} of host='127.0.0.1' .*already in use"):
            run(serve(engine, second))


def test_what_was_there_before_is_not_searched_for_garbage_while_it_serves(serve_scripted):
    running = serve_scripted([])
    assert running.call(gc.get_freeze_count) > 10_000
    running.close()
    assert gc.get_freeze_count() == 0


def test_no_two_requests_have_one_name():
    names = {new_id("cmpl") for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.startswith("cmpl-") and len(name) == 37 for name in names)
