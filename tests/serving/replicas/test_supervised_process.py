"""Replicas and nginx that die, hang, are ill or too busy: who is started again, and when that ends."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx
from vllm_teach.serving.replicas.server_health import Health
from vllm_teach.serving.replicas.supervised_process import RestartLimits, SupervisedProcess

pytestmark = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)


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
        assert await group.reported("replica 0", "serves again") == group.reports[-1]

        async def spread() -> bool:
            return {(await group.post("/short"))[1]["pid"] for _ in range(4)} == {
                state["pid"] for state in await group.states()
            }

        await until(spread)  # when nginx has forgotten the failures

    try_it(test, fail_timeout=1)


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
        await group.reported("nginx", "serves again")
        await until(lambda: not any(map(alive, [master, *workers])))

        async def serves() -> bool:
            try:
                return (await group.post("/short"))[0] == 200
            except aiohttp.ClientError:
                return False

        await until(serves)

    try_it(test, workers=3)


@pytest.mark.parametrize(("probes_on", "ends"), [(True, True), (False, False)])
def test_only_what_is_probed_on_is_ended_for_what_it_says(probes_on, ends, tmp_path):
    """nginx is not: when it is too busy to answer, all streams would end with it."""

    async def test() -> None:
        said = [Health.ILL] * 100 + [Health.WELL]

        async def probe() -> Health:
            return said.pop()

        limits = RestartLimits(probe_interval=0.01, max_restarts=0)
        server = SupervisedProcess(
            "it", ["sleep", "300"], tmp_path / "log", probe, limits, reports.append, probes_on=probes_on
        )
        await server.start()
        running = asyncio.ensure_future(server.keep_running())
        await asyncio.wait({running}, timeout=30.0 if ends else 0.2)
        assert running.done() == ends
        assert len(said) == (99 if ends else 100)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(5.0)
        assert reports == []

    reports: list[str] = []
    asyncio.run(test())


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


def test_pauses_double_up_to_a_limit():
    limits = RestartLimits(back_off=0.5, longest_back_off=3)
    assert [limits.pause(times) for times in (1, 2, 3, 4, 10_000)] == [0.5, 1, 2, 3, 3]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
