"""Several replicas behind the real nginx: how streams spread, and what a death, an abort or a slow client does."""

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import yaml

from vllm_teach import resources
from vllm_teach.errors import InvalidArgumentError, ReplicaError
from vllm_teach.serving.replicas import replica_group
from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx
from vllm_teach.serving.replicas.replica_group import ReplicaGroup, ReplicaSettings, prometheus_configuration
from vllm_teach.serving.replicas.supervised_process import RestartLimits

pytestmark = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)


@pytest.mark.parametrize("workers", [1, 4])
def test_long_streams_spread_evenly_whichever_worker_took_them(workers, try_it):
    async def test(group) -> None:
        streams = await asyncio.gather(*(group.stream() for _ in range(30)))
        assert [state["running"] for state in await group.states()] == [10, 10, 10]
        await group.tell("/release")
        assert [await stream.text() for stream in streams] == ["last\n"] * 30

    try_it(test, replicas=3, workers=workers)


@pytest.mark.parametrize(("policy", "spread"), [("least_conn", [6, 6]), ("round_robin", [12, 0])])
def test_where_every_second_request_is_long_only_least_conn_spreads_them(policy, spread, try_it):
    async def test(group) -> None:
        for _ in range(12):
            await group.stream()
            await group.post("/short")
        assert sorted((state["running"] for state in await group.states()), reverse=True) == spread

    # One worker, which has counted a request as done before it reads the next.
    try_it(test, workers=1, policy=policy)


def test_each_piece_of_a_stream_arrives_before_the_next_is_written(try_it):
    async def test(group) -> None:
        response = await group.client.post(f"{group.group.url}/pieces")
        for number in range(1, 6):
            await group.tell("/next", 0)
            async with asyncio.timeout(20):
                assert await response.content.readline() == f"piece {number}\n".encode()
        await group.tell("/release")
        assert await response.text() == ""

    try_it(test, replicas=1)


def test_a_killed_replica_loses_its_own_streams_only_and_comes_back(try_it, until):
    async def test(group) -> None:
        streams = await asyncio.gather(*(group.stream() for _ in range(20)))
        before = await group.states()
        lost = [stream for stream in streams if stream.headers["X-Replica"] == str(before[0]["pid"])]
        assert len(lost) == 10

        os.kill(before[0]["pid"], signal.SIGKILL)
        for stream in lost:
            with pytest.raises(aiohttp.ClientPayloadError):  # cut, and not as if it had ended
                await stream.text()
        # Whether the dead one is being tried, left out or back: none of these is lost.
        answers = await asyncio.gather(*(group.post("/short", json={}) for _ in range(50)))
        assert {status for status, _ in answers} == {200}

        await group.tell("/release", 1)
        assert [await stream.text() for stream in streams if stream not in lost] == ["last\n"] * 10
        assert "it is started again" in await group.reported("replica 0", "was ended by SIGKILL")
        await group.back(0, before[0]["pid"])

        async def spread() -> bool:
            return {(await group.post("/short"))[1]["pid"] for _ in range(4)} == {
                state["pid"] for state in await group.states()
            }

        await until(spread)  # when nginx has forgotten the failures

    try_it(test, fail_timeout=1)


def test_a_post_that_a_replica_took_is_not_sent_to_another(try_it, until, alive):
    async def test(group) -> None:
        before = [state["pid"] for state in await group.states()]
        async with group.client.post(f"{group.group.url}/die") as response:
            assert response.status == 502
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "replica_down"
        await until(lambda: not all(map(alive, before)))
        dead = [index for index, pid in enumerate(before) if not alive(pid)]
        await group.back(dead[0], before[dead[0]])
        assert len(dead) == 1
        assert (await group.state(1 - dead[0]))["pid"] == before[1 - dead[0]]

    try_it(test)


@pytest.mark.parametrize("path", ["/stream", "/whole"])
def test_a_client_that_goes_away_ends_its_request_at_the_replica(path, try_it, until):
    async def test(group) -> None:
        async def running(count: int) -> bool:
            return sum(state["running"] for state in await group.states()) == count

        requests = [asyncio.ensure_future(group.client.post(group.group.url + path)) for _ in range(6)]
        await until(partial(running, 6))
        for request in requests[:4]:
            if request.done():
                request.result().close()
            else:
                request.cancel()
        await until(partial(running, 2))
        await group.tell("/release")
        for request in requests[4:]:
            assert (await request).status == 200

    try_it(test)


def test_connections_to_the_replicas_are_kept(try_it):
    async def test(group) -> None:
        for _ in range(40):
            await group.post("/short", json={})
        states = await group.states()
        assert [state["requests"] for state in states] == [20, 20]
        assert [state["connections"] for state in states] == [1, 1]

    try_it(test, workers=1, keepalive_timeout=30.0)


def test_a_slow_client_is_cut_off_and_no_replica_hears_of_it(try_it):
    async def test(group) -> None:
        port = int(group.group.url.rpartition(":")[2])
        beginnings = [
            b"POST /short HTTP/1.1\r\nHost: a\r\n",
            b"POST /short HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        ]
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for number, (_, writer) in enumerate(slow):
            writer.write(beginnings[number % 2])
        assert (await group.post("/short"))[0] == 200
        for reader, writer in slow:
            assert (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n")[0] in (
                b"",
                b"HTTP/1.1 408 Request Time-out",
            )
            writer.close()
        assert sum(state["requests"] for state in await group.states()) == 1

    try_it(test, header_timeout=0.5, body_timeout=0.5)


def test_what_nginx_says_itself_is_openais_error_object(try_it):
    async def test(group) -> None:
        status, answer = await group.post("/short", data=b"x" * 200_000)
        assert (status, answer["bytes"]) == (200, 200_000), "more than nginx keeps in memory"
        status, answer = await group.post("/short", data=b"x" * 300_000)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "250000" in answer["error"]["message"]
        async with group.client.post(f"{group.group.url}/whole") as response:
            assert response.status == 504
            assert response.headers["X-Should-Retry"] == "false"
            assert (await response.json())["error"]["type"] == "timeout_error"
        async with group.client.get(f"{group.group.url}/metrics") as response:
            assert response.status == 404
            message = (await response.json())["error"]["message"]
            assert all(f"http://{address}/metrics" in message for address in group.group.addresses)

    try_it(test, max_body_bytes=250_000, read_timeout=0.3)


def test_a_replica_is_told_which_host_the_client_asked_for(try_it):
    async def test(group) -> None:
        _, answer = await group.post("/short", headers={"Host": "my.example:81"})
        assert answer["headers"]["Host"] == "my.example:81"
        assert answer["headers"]["X-Forwarded-For"] == "127.0.0.1"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(group.group.url.rpartition(":")[2]))
        writer.write(b"GET /short HTTP/1.0\r\n\r\n")  # names none, as HTTP/1.0 may
        assert b" 200 " in await reader.readline()
        writer.close()

    try_it(test)


def test_the_log_and_prometheus_know_each_replica(try_it, until):
    async def test(group) -> None:
        for _ in range(4):
            await group.post("/short")

        async def lines() -> list[dict[str, str]]:
            log = (group.group.folder / "access.log").read_text().splitlines()
            return [json.loads(line) for line in log] if len(log) == 4 else []

        rows = await until(lines)
        assert {row["upstream"] for row in rows} == set(group.group.addresses)
        assert {(row["status"], row["request"]) for row in rows} == {("200", "POST /short HTTP/1.1")}
        monitoring = (group.group.folder / "prometheus.yml").read_text()
        assert all(address in monitoring for address in group.group.addresses)

    try_it(test)


def test_prometheus_is_pointed_at_each_replica_and_else_told_the_same():
    shipped = yaml.safe_load((resources.folder("data") / "monitoring" / "prometheus.yml").read_text())
    written = yaml.safe_load(prometheus_configuration(["127.0.0.1:9001", "127.0.0.1:9002"]))
    assert written["scrape_configs"][0].pop("static_configs") == [{"targets": ["127.0.0.1:9001", "127.0.0.1:9002"]}]
    shipped["scrape_configs"][0].pop("static_configs")
    assert written == shipped


@pytest.mark.parametrize("how", ["ill", "hangs"])
def test_a_replica_that_lives_but_does_not_work_is_started_again(how, try_it):
    async def test(group) -> None:
        before = (await group.state(0))["pid"]
        if how == "ill":
            await group.tell("/sicken", 0)
        else:
            os.kill(before, signal.SIGSTOP)
        await group.reported("replica 0", "does not work" if how == "ill" else "silent")
        await group.back(0, before)

    try_it(test, limits=RestartLimits(probe_interval=0.05, silence=0.5, back_off=0.05))


def test_a_killed_nginx_is_started_again_and_none_of_its_workers_stays(try_it, until, alive):
    async def test(group) -> None:
        assert group.group.nginx is not None
        master = group.group.nginx.child.pid
        workers = await until(lambda: found if len(found := children(master)) == 3 else None)
        os.kill(master, signal.SIGKILL)
        await group.reported("nginx", "SIGKILL")
        await until(lambda: not any(map(alive, [master, *workers])))

        async def serves() -> bool:
            try:
                return (await group.post("/short"))[0] == 200
            except aiohttp.ClientError:
                return False

        await until(serves)

    try_it(test, workers=3)


def test_a_replica_that_keeps_going_down_is_given_up_and_the_last_one_ends_it_all(try_it, folder, fake_command):
    async def test(group) -> None:
        (group.group.folder / "refuse").touch()
        os.kill((await group.state(0))["pid"], signal.SIGKILL)
        given_up = await group.reported("replica 0", "given up")
        assert "the fake refuses to start" in given_up
        assert sum("is started again" in each for each in group.reports) == 2
        assert (await group.post("/short"))[0] == 200
        os.kill((await group.state(1))["pid"], signal.SIGKILL)
        with pytest.raises(ReplicaError, match="no replica is left"):
            await asyncio.wait_for(group.running, 30)

    command = fake_command("--refuse-when", str(folder / "refuse"))
    try_it(test, command=command, limits=RestartLimits(probe_interval=0.05, back_off=0.05, max_restarts=2))


def test_a_replica_that_cannot_start_at_first_is_an_error_that_tells_its_last_words(try_it, folder, fake_command):
    (folder / "refuse").touch()
    with pytest.raises(ReplicaError, match=r"status 3 .*the fake refuses to start"):
        try_it(None, command=fake_command("--refuse-when", str(folder / "refuse")))


def test_a_command_that_is_not_there_is_an_error(try_it):
    with pytest.raises(ReplicaError, match="/no/such/program cannot be started"):
        try_it(None, command=lambda index, port: ["/no/such/program", str(port)])


def test_a_replica_that_is_not_ready_in_time_is_an_error_and_is_ended(try_it):
    limits = RestartLimits(start_timeout=0.3, probe_interval=0.05)
    with pytest.raises(ReplicaError, match=r"start_timeout=0\.3"):
        try_it(None, command=lambda index, port: ["sleep", "300"], limits=limits)


def test_without_nginx_the_replicas_serve_on_their_ports(monkeypatch, try_it):
    async def test(group) -> None:
        assert [state["running"] for state in await group.states()] == [0, 0]
        [report] = group.reports
        assert "apt-get install nginx-light" in report
        assert str(group.group.folder / "nginx.conf") in report
        assert all(address in report for address in group.group.addresses)

    monkeypatch.setattr(replica_group, "find_nginx", lambda: None)
    try_it(test)


def test_replicas_share_the_cores_and_have_devices_of_their_own(monkeypatch, try_it):
    async def test(group) -> None:
        environments = [state["environment"] for state in await group.states()]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0,1", "2,3"]
        assert [each["OMP_NUM_THREADS"] for each in environments] == ["3", "3"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(replica_group, "_usable_cores", lambda: 7)
    try_it(test, devices=("0,1", "2,3"))


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


@pytest.mark.parametrize(
    ("settings", "named"), [({"replicas": 0}, "replicas="), ({"devices": ("0",)}, "devices="), ({"port": -1}, "port=")]
)
def test_a_bad_setting_is_named(settings, named):
    with pytest.raises(InvalidArgumentError, match=named):
        ReplicaSettings(**settings)


def test_pauses_double_up_to_a_limit():
    limits = RestartLimits(back_off=0.5, longest_back_off=3)
    assert [limits.pause(times) for times in (1, 2, 3, 4, 10_000)] == [0.5, 1, 2, 3, 3]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
