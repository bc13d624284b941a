"""What the tests of replicas share: fake ones, alone or behind the real nginx, in this process and its loop."""

import asyncio
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from vllm_teach.serving.replicas.nginx_configuration import NginxSettings
from vllm_teach.serving.replicas.replica_group import ReplicaCommand, ReplicaGroup, ReplicaSettings
from vllm_teach.serving.replicas.supervised_process import RestartLimits

FAKE = Path(__file__).with_name("fake_replica.py")
QUICK = RestartLimits(start_timeout=30, probe_interval=0.05, back_off=0.05, longest_back_off=0.1)


@pytest.fixture(name="fake_command")
def provide_fake_command() -> Callable[..., ReplicaCommand]:
    return fake_command


@pytest.fixture(name="until")
def provide_until() -> Callable[..., Coroutine[Any, Any, Any]]:
    return until


@pytest.fixture(name="alive")
def provide_alive() -> Callable[[int], bool]:
    return alive


@pytest.fixture(name="served")
def provide_served(folder: Path) -> Callable[..., AbstractAsyncContextManager["Served"]]:
    """`async with served(**settings) as group`: a group that serves."""
    return partial(served, folder)


@pytest.fixture
def try_it(folder: Path) -> Callable[..., None]:
    """Run a test, an async function of a group that serves, and stop the group."""

    def run(test: Callable[[Served], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def run_test() -> None:
            async with served(folder, **settings) as group:
                await test(group)

        asyncio.run(asyncio.wait_for(run_test(), 120))

    return run


def fake_command(*more: str) -> ReplicaCommand:
    return lambda index, port: [sys.executable, str(FAKE), "--port", str(port), *more]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that another user can enter, as nginx's workers are when root runs the tests; pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-teach-test-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Served:
    """A running group, a client of it, and what it reported."""

    def __init__(self, group: ReplicaGroup, client: aiohttp.ClientSession, running: "asyncio.Task[None]") -> None:
        self.group, self.client, self.running = group, client, running
        self.reports: list[str] = []

    async def post(self, path: str, **arguments: Any) -> tuple[int, Any]:
        """Through nginx; the status and the JSON of the answer."""
        async with self.client.post(self.group.url + path, **arguments) as response:
            return response.status, await response.json()

    async def stream(self) -> aiohttp.ClientResponse:
        """Begin a stream through nginx; returns after its first line."""
        response = await self.client.post(f"{self.group.url}/stream")
        assert await response.content.readline() == b"first\n"
        return response

    async def state(self, index: int) -> dict[str, Any]:
        """What a replica says of itself, not through nginx."""
        async with self.client.get(f"http://{self.group.addresses[index]}/state") as response:
            return await response.json()

    async def states(self) -> list[dict[str, Any]]:
        return [await self.state(index) for index in range(len(self.group.addresses))]

    async def tell(self, path: str, *indices: int) -> None:
        """Post to replicas (all, unless some are named), not through nginx."""
        for index in indices or range(len(self.group.addresses)):
            async with self.client.post(f"http://{self.group.addresses[index]}{path}") as response:
                assert response.status == 200

    async def release_all(self) -> None:
        """End all streams, of the replicas that can still be told."""
        for index in range(len(self.group.addresses)):
            with suppress(aiohttp.ClientError, TimeoutError):
                await asyncio.wait_for(self.tell("/release", index), 2)

    async def back(self, index: int, before: int) -> dict[str, Any]:
        """Wait until a replica serves in another process than `before`."""

        async def other() -> dict[str, Any] | None:
            try:
                state = await self.state(index)
            except aiohttp.ClientError:
                return None
            return state if state["pid"] != before else None

        return await until(other)

    async def reported(self, *words: str) -> str:
        async def found() -> str | None:
            return next((each for each in self.reports if all(word in each for word in words)), None)

        return await until(found)


async def until(see: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Ask until the answer is true, and return it; a test that waits in vain fails."""
    async with asyncio.timeout(seconds):
        while True:
            answer = see()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@asynccontextmanager
async def served(
    folder: Path,
    *,
    command: ReplicaCommand | None = None,
    replicas: int = 2,
    limits: RestartLimits = QUICK,
    devices: tuple[str, ...] = (),
    **nginx: Any,
) -> AsyncIterator[Served]:
    settings = ReplicaSettings(
        replicas, port=0, drain_timeout=5.0, nginx=NginxSettings(**nginx), restarts=limits, devices=devices
    )
    reports: list[str] = []
    group = ReplicaGroup(command or fake_command(), folder, settings, reports.append)
    running = asyncio.ensure_future(group.run())
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as client:
        served = Served(group, client, running)
        served.reports = reports
        try:

            async def ready() -> bool:
                return running.done() or any("served on" in each for each in reports)

            await until(ready)
            if running.done():
                running.result()
            yield served
        finally:
            if not running.done():
                await served.release_all()
                group.stop()
            await asyncio.wait({running})
