"""`vllm-teach serve --replicas 2` on the tiny model behind the real nginx: streams, a death, an abort, the end."""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach import LLM, SamplingParams
from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx

pytestmark = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)
PROMPT = "def read("
LONG = 400  # tokens; so long that one stream is still young when the next begins


class Server:
    """The running command."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "vllm_teach.cli", "serve", "--model", "tiny", "--dtype", "float32"]
        command += ["--replicas", "2", "--port", "0", "--run-folder", str(folder), "--fail-timeout", "1"]
        self.folder = folder
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        assert "are served on" in said, said
        self.url = said.partition("served on ")[2].partition(" ")[0]
        self.replicas = [f"http://{each}" for each in said.partition("(")[2].partition(")")[0].split(", ")]

    def supervised(self) -> list[psutil.Process]:
        """The processes of the replicas that run, in the order of their addresses."""
        ports = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it may end meanwhile
                words = child.cmdline()
                if "--replicas" in words:
                    ports[words[-3]] = child  # ... --port PORT --replicas 1
        return [ports[port] for url in self.replicas if (port := url.rpartition(":")[2]) in ports]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vllm-teach-test-") as name:
        Path(name).chmod(0o711)
        server = Server(Path(name))
        yield server
        server.process.terminate()  # unless the last test has ended it
        assert server.process.wait(60) == 0
        assert server.process.stderr is not None
        server.process.stderr.close()


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def stream(session: aiohttp.ClientSession, server: Server, max_tokens: int = LONG) -> list[str]:
    """The pieces of a completion; raises where it is cut."""
    return [piece async for piece in pieces(session, server, max_tokens)]


async def pieces(session: aiohttp.ClientSession, server: Server, max_tokens: int) -> AsyncIterator[str]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    async with session.post(f"{server.url}/v1/completions", json={**body, "ignore_eos": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


async def metric(session: aiohttp.ClientSession, server: Server, name: str, **labels: str) -> float:
    """The sum over both replicas."""
    total = 0.0
    for url in server.replicas:
        async with session.get(f"{url}/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                total += sum(
                    sample.value
                    for sample in family.samples
                    if sample.name == name and labels.items() <= sample.labels.items()
                )
    return total


def rows(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (server.folder / "access.log").read_text().splitlines()]


def test_streams_spread_and_say_what_the_engine_says(server):
    async def test() -> list[list[str]]:
        async with client() as session:
            return await asyncio.gather(*(stream(session, server) for _ in range(16)))

    answers = asyncio.run(test())
    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    expected = LLM("tiny", dtype="float32").generate(PROMPT, params)[0].outputs[0].text
    assert {"".join(pieces) for pieces in answers} == {expected}
    assert min(len(pieces) for pieces in answers) > LONG / 4, "piece by piece"
    took = [row["upstream"] for row in rows(server)[-16:]]
    counts = [took.count(url.removeprefix("http://")) for url in server.replicas]
    assert counts == [8, 8]


def test_a_client_that_goes_away_ends_its_request_in_the_engine(server, until):
    async def test() -> None:
        async with client() as session:
            aborted = {"name": "vllm:request_success_total", "finished_reason": "abort"}
            before = await metric(session, server, **aborted)
            for _ in range(6):
                async for _ in pieces(session, server, LONG):
                    break

            async def counted() -> bool:
                return await metric(session, server, **aborted) == before + 6

            await until(counted)
            assert await metric(session, server, "vllm:num_requests_running") == 0

    asyncio.run(test())


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_killed_replica_loses_its_own_streams_only_and_comes_back(server, until, victim):
    async def test() -> None:
        async with client() as session:
            before = server.supervised()
            streams = [asyncio.ensure_future(stream(session, server)) for _ in range(16)]

            async def all_run() -> bool:
                return await metric(session, server, "vllm:num_requests_running") == 16

            await until(all_run)
            below = before[0].children(recursive=True)
            assert below, "the engine is a process of its own"
            for each in [before[0]] if victim == "server" else below:
                each.kill()
            done = await asyncio.gather(*streams, return_exceptions=True)
            assert sum(isinstance(each, list) for each in done) == 8, done

            async def back() -> bool:
                now = server.supervised()
                if len(now) < 2 or now[0] == before[0]:
                    return False
                try:
                    async with session.get(f"{server.replicas[0]}/health") as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await until(back, 60)
            assert not any(each.is_running() for each in [before[0], *below])
            assert server.supervised()[1] == before[1], "the other one was left alone"
            await asyncio.gather(*(stream(session, server, 8) for _ in range(8)))

    asyncio.run(test())


def test_told_to_stop_it_finishes_its_streams_and_ends_well(server, until):
    """The last test, as it ends the server."""

    async def test() -> None:
        async with client() as session:
            running = server.supervised()
            streams = [asyncio.ensure_future(stream(session, server)) for _ in range(8)]

            async def all_run() -> bool:
                return await metric(session, server, "vllm:num_requests_running") == 8

            await until(all_run)
            server.process.terminate()
            answers = await asyncio.gather(*streams)
            assert len({"".join(pieces) for pieces in answers}) == 1
            await until(lambda: server.process.poll() is not None, 60)
            assert server.process.returncode == 0
            assert not any(each.is_running() for each in running)

    asyncio.run(test())
