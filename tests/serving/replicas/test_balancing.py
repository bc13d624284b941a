"""The real nginx before several fake replicas: how streams spread, what is passed on, and what is not repeated."""

import asyncio
import json
from functools import partial

import pytest

from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx
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


def test_a_request_has_one_name_at_the_replica_in_the_log_and_in_the_answer(try_it, until):
    async def test(group) -> None:
        _, answer = await group.post("/short", headers={"X-Request-ID": "mine"})
        assert answer["headers"]["X-Request-ID"] == "mine"
        for odd in ("two words", "x" * 129):
            _, answer = await group.post("/short", headers={"X-Request-ID": odd})
            assert answer["headers"]["X-Request-ID"].startswith("req-")
        async with group.client.post(f"{group.group.url}/die") as response:
            [name] = response.headers.getall("X-Request-ID")

        async def logged() -> bool:
            log = (group.group.folder / "access.log").read_text().splitlines()
            return [json.loads(line)["request_id"] for line in log][::3] == ["mine", name]

        await until(logged)

    try_it(test)


def test_the_health_of_the_whole_is_that_of_a_replica_that_is_well(try_it):
    async def test(group) -> None:
        async def ask(count: int) -> set[int]:
            statuses = set()
            for _ in range(count):
                async with group.client.get(f"{group.group.url}/health") as response:
                    statuses.add(response.status)
            return statuses

        await group.tell("/sicken", 0)
        assert await ask(8) == {200}
        await group.tell("/sicken", 1)
        assert 200 not in await ask(8)

    # Longer than the test takes: nginx alone has to see it.
    try_it(test, workers=1, limits=RestartLimits(probe_interval=120.0))


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
        assert len({row["request_id"] for row in rows}) == 4
        assert {(row["status"], row["request"]) for row in rows} == {("200", "POST /short HTTP/1.1")}
        targets = json.loads((group.group.folder / "targets.json").read_text())
        assert [each["targets"] for each in targets] == [[address] for address in group.group.addresses]

    try_it(test)
