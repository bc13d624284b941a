"""A group of replicas: its ports, its environment, its end, and what it says."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vllm_teach.errors import InvalidArgumentError, ReplicaError
from vllm_teach.openmp import WAIT_SHORTLY
from vllm_teach.serving.replicas import replica_group
from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx, nginx_listens
from vllm_teach.serving.replicas.replica_group import ReplicaGroup, ReplicaSettings
from vllm_teach.serving.replicas.supervised_process import RestartLimits

OF_THE_USER = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "9"}

pytestmark = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)


def test_without_nginx_the_replicas_serve_on_their_ports(monkeypatch, try_it):
    async def test(group) -> None:
        assert [state["running"] for state in await group.states()] == [0, 0]
        [report] = group.reports
        assert "apt-get install nginx-light" in report
        assert str(group.group.folder / "nginx.conf") in report
        assert all(address in report for address in group.group.addresses)

    monkeypatch.setattr(replica_group, "find_nginx", lambda: None)
    try_it(test)


@pytest.mark.parametrize(
    ("set_here", "openmp"),
    [
        ({}, {"OMP_NUM_THREADS": "3", **WAIT_SHORTLY}),
        *[({"OMP_NUM_THREADS": "5", name: value},) * 2 for name, value in OF_THE_USER.items()],
    ],
)
def test_replicas_share_the_cores_and_have_devices_of_their_own(set_here, openmp, monkeypatch, try_it):
    async def test(group) -> None:
        environments = [state["environment"] for state in await group.states()]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0,1", "2,3"]
        for name in ("OMP_NUM_THREADS", *WAIT_SHORTLY):
            assert [each[name] for each in environments] == [openmp.get(name)] * 2
        await group.reported(f"each replica has {' '.join(map('='.join, openmp.items()))}.")

    for name in ("OMP_NUM_THREADS", *WAIT_SHORTLY):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(replica_group, "_usable_cores", lambda: 7)
    try_it(test, devices=("0,1", "2,3"))


def test_where_another_program_has_taken_the_port_it_does_not_say_that_it_serves(folder, fake_command):
    async def test() -> None:
        reports: list[str] = []
        limits = RestartLimits(probe_interval=0.05)
        group = ReplicaGroup(fake_command(), folder, ReplicaSettings(1, port=0, restarts=limits), reports.append)
        with listening(group.url), pytest.raises(ReplicaError, match=r"nginx .* before it served"):
            await group.run()
        assert reports == []

    asyncio.run(test())


def test_the_number_of_an_nginx_that_was_killed_is_not_taken_for_that_of_a_new_one(folder, fake_command):
    async def test() -> None:
        group = ReplicaGroup(fake_command(), folder, ReplicaSettings(port=0), print)
        assert not nginx_listens(folder, 17)
        group.stop()
        await group.run()

    (folder / "nginx.pid").write_text("17\n")
    asyncio.run(test())


def test_a_group_that_cannot_be_made_lets_its_port_go(monkeypatch, folder, fake_command):
    def refuse(*_: object) -> None:
        raise ReplicaError("no.")

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    monkeypatch.setattr(replica_group, "check_configuration", refuse)
    with pytest.raises(ReplicaError) as caught:
        ReplicaGroup(fake_command(), folder, ReplicaSettings(port=port), print)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))  # while the error, and all that it refers to, is still there
    del caught


def test_a_port_that_is_taken_is_an_error_before_a_model_is_loaded(folder, fake_command):
    async def run() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(InvalidArgumentError, match=f"port={port} .*in use"):
                ReplicaGroup(fake_command(), folder, ReplicaSettings(port=port), print)
        assert not (folder / "replica-0.log").exists()

    asyncio.run(run())


def test_told_to_stop_before_it_serves_it_ends(folder, until, alive):
    async def test() -> None:
        group = ReplicaGroup(lambda index, port: ["sleep", "300"], folder, ReplicaSettings(port=0), print)
        running = asyncio.ensure_future(group.run())
        await until(lambda: all(replica.child for replica in group.replicas))
        group.stop()
        await asyncio.wait_for(running, 30)
        assert not any(alive(replica.child.pid) for replica in group.replicas)

    asyncio.run(test())


def test_where_nothing_has_served_nothing_in_flight_is_waited_for(monkeypatch, folder, alive):
    """One cannot be started, and the other takes its time to end."""

    def command(index: int, port: int) -> list[str]:
        return ["sh", "-c", "exit 3"] if index == 0 else ["sleep", "300"]

    async def test() -> None:
        reports: list[str] = []
        group = ReplicaGroup(command, folder, ReplicaSettings(port=0), reports.append)
        with pytest.raises(ReplicaError, match="before it served"):
            await group.run()
        assert reports == []
        assert not alive(group.replicas[1].child.pid)

    monkeypatch.setattr(replica_group, "find_nginx", lambda: None)
    monkeypatch.setattr(replica_group, "_QUICK_END", 0.0)
    asyncio.run(test())


def test_after_an_end_that_failed_nothing_is_said_to_be_waited_for(monkeypatch, try_it):
    class EndError(Exception):
        pass

    async def fail(seconds: float) -> None:
        raise EndError

    async def test(group) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(group.group.nginx, "stop", fail)
            with pytest.raises(EndError):
                await group.group._stop_all()
        before = len(group.reports)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(group.reports) == before
        monkeypatch.undo()

    monkeypatch.setattr(replica_group, "_QUICK_END", 0.0)
    try_it(test)


@pytest.mark.parametrize(
    ("settings", "named"), [({"replicas": 0}, "replicas="), ({"devices": ("0",)}, "devices="), ({"port": -1}, "port=")]
)
def test_a_bad_setting_is_named(settings, named):
    with pytest.raises(InvalidArgumentError, match=named):
        ReplicaSettings(**settings)


@contextmanager
def listening(url: str) -> Iterator[None]:
    """Somebody else's server on the port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        sock.listen()
        yield
