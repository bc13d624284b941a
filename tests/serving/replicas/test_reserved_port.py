"""A port that is kept for a child: nobody else gets it, connections are refused, the child can serve on it."""

import errno
import socket
import sys

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.replicas.reserved_port import ReservedPort

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child share the port")


def bind(port: int, share: bool) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(share))
    sock.bind(("127.0.0.1", port))
    return sock


def test_the_child_serves_on_it_and_again_after_its_death():
    reserved = ReservedPort("127.0.0.1")
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", reserved.port))
        with bind(reserved.port, share=True) as server:
            server.listen()
            with socket.create_connection(("127.0.0.1", reserved.port)) as client, server.accept()[0] as connection:
                client.sendall(b"x")
                assert connection.recv(1) == b"x"
    reserved.close()


def test_nobody_else_gets_it():
    reserved = [ReservedPort("127.0.0.1") for _ in range(50)]
    ports = {each.port for each in reserved}
    assert len(ports) == 50
    with pytest.raises(OSError, match="in use") as caught:
        bind(reserved[0].port, share=False)
    assert caught.value.errno == errno.EADDRINUSE
    others = [bind(0, share=True) for _ in range(200)]  # asks for any free port
    assert ports.isdisjoint(each.getsockname()[1] for each in others)
    for each in (*others, *reserved):
        each.close()


def test_a_port_that_somebody_serves_on_is_refused_in_words():
    with bind(0, share=True) as server:
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"port={port} of host='127.0.0.1' .*in use"):
            ReservedPort("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "a" * 70])
def test_a_host_that_is_not_this_machine_is_refused_in_words(host):
    with pytest.raises(InvalidArgumentError, match=f"of host='{host}'"):
        ReservedPort(host)


def test_a_name_has_one_port_at_all_its_addresses():
    reserved = ReservedPort("localhost")
    assert {port for _, port in reserved.addresses} == {reserved.port}
    assert {address for address, _ in reserved.addresses} <= {"127.0.0.1", "::1"}
    reserved.close()


def test_closing_gives_it_back():
    reserved = ReservedPort("127.0.0.1")
    port = reserved.port
    reserved.close()
    bind(port, share=False).close()
