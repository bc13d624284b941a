"""The tiny model on a Ray cluster of two nodes: OpenAI's client, growth, streams, deaths, the end."""

import asyncio
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import MissingDependencyError, installs
from vllm_teach.serving.ray_app import build_app

HAS_RAY = find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason=f"Ray is not installed: run {installs('ray')}")
CLUSTER = Path(__file__).parent / "fleet" / "two_nodes.py"
PATIENCE = 120.0  # seconds; a bound on a test that waits in vain
PROMPT = "def read("
LONG = 400  # tokens


class Fleet:
    """The running cluster, its processes, and what its service answers."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(CLUSTER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        self.url = self.process.stdout.readline().strip() if readable else ""
        if not self.url:
            self.kill()
            pytest.fail(f"the cluster does not start: {log.read_text()[-3000:]}")
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def processes(self) -> list[psutil.Process]:
        """All processes below the cluster's."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> dict[int, psutil.Process]:
        """Those in which the app runs, by their node, which is the process that started them."""
        found = {}
        for each in self.processes():
            with suppress(psutil.Error):  # it may end meanwhile
                if " ".join(each.cmdline()).startswith("ray::ServeReplica:"):
                    found[each.ppid()] = each
        return found

    def complete(self, **options: Any) -> str:
        """The text of a completion."""
        options = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **options}
        return self.client.completions.create(model="tiny", **options).choices[0].text

    def end(self) -> int:
        """End the cluster in good order; return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """End everything at once."""
        for each in [*self.processes(), self.process]:
            with suppress(psutil.Error):
                each.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="vllm-teach-test-") as folder:
        fleet = Fleet(Path(folder) / "cluster.log")
        try:
            yield fleet
            if fleet.process.poll() is None:  # the last test ends it
                assert fleet.end() == 0
        finally:
            if fleet.process.poll() is None:
                fleet.kill()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM("tiny", dtype="float32")


async def until(see: Callable[[], Any]) -> Any:
    """Ask until the answer is true, and return it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = see()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.1)


async def stream(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    max_tokens: int = LONG,
    begun: asyncio.Semaphore | None = None,
    **options: Any,
) -> int:
    """Read a stream; return its events, raise where it is cut. `begun` is released when it has begun."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{fleet.url}/v1/completions", json={**body, "stream": True, **options}) as response:
        if begun is not None:
            begun.release()
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n", lines[-1]
    return len(lines) - 1


async def by_replica(session: aiohttp.ClientSession, fleet: Fleet, name: str, **labels: str) -> dict[str, float]:
    """A metric of each replica."""
    found: dict[str, float] = {}
    async with session.get(f"{fleet.url}/metrics") as response:
        response.raise_for_status()
        for family in text_string_to_metric_families(await response.text()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    engine = sample.labels["engine"]
                    found[engine] = found.get(engine, 0.0) + sample.value
    return found


async def grow(session: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Load the service until it has its two replicas, which both answer."""
    deadline = time.monotonic() + PATIENCE
    while len(await by_replica(session, fleet, "vllm:num_requests_running")) < 2:
        assert time.monotonic() < deadline
        await asyncio.gather(*(stream(session, fleet) for _ in range(8)))


def run(test: Callable[[aiohttp.ClientSession], Any]) -> None:
    async def limited() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            await test(session)

    asyncio.run(asyncio.wait_for(limited(), 2 * PATIENCE))


@pytest.mark.parametrize("arguments", [{"model": "tiny"}, {}])
def test_without_ray_it_says_what_to_install(monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[ray\]" in the clone'):
        build_app(arguments)


@needs_ray
def test_openai_client_gets_what_the_engine_says(fleet, offline):
    assert [model.id for model in fleet.client.models.list()] == ["tiny"]
    for options in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
        expected = offline.generate(PROMPT, SamplingParams(max_tokens=24, **options))[0].outputs[0].text
        assert fleet.complete(**options) == expected
        pieces = list(
            fleet.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, stream=True, **options)
        )
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        assert len(pieces) > 1
    with pytest.raises(openai.NotFoundError, match="model='other' does not exist here"):
        fleet.client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        fleet.complete(temperature=-1)


@needs_ray
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("given", [{}, {"X-Request-ID": "mine"}])
def test_an_answer_has_one_name_the_clients_own_if_it_has_one(fleet, status, given):
    async def test(session: aiohttp.ClientSession) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1 if status == 200 else -1}
        async with session.post(f"{fleet.url}/v1/completions", json=body, headers=given) as response:
            assert response.status == status
            [name] = response.headers.getall("x-request-id")
            assert name == given.get("X-Request-ID", name)

    run(test)


@needs_ray
def test_under_load_a_replica_comes_up_on_the_other_node_and_shares_it(fleet):
    async def test(session: aiohttp.ClientSession) -> None:
        await grow(session, fleet)
        assert len(fleet.replicas()) == 2
        ended = {"name": "vllm:request_success_total", "finished_reason": "length"}
        before = await by_replica(session, fleet, **ended)
        counts = await asyncio.gather(*(stream(session, fleet) for _ in range(16)))
        after = await by_replica(session, fleet, **ended)
        shares = [after[replica] - before[replica] for replica in after]
        assert sum(shares) == 16
        assert min(shares) >= 6, shares
        assert min(counts) > LONG / 4, "piece by piece"

    run(test)


@needs_ray
def test_a_client_that_goes_away_ends_its_request_in_the_engine(fleet):
    async def test(session: aiohttp.ClientSession) -> None:
        async def aborted() -> float:
            counts = await by_replica(session, fleet, "vllm:request_success_total", finished_reason="abort")
            return sum(counts.values())

        before = await aborted()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{fleet.url}/v1/completions", json={**body, "stream": True}) as response:
            await response.content.readline()

        async def counted() -> bool:
            return await aborted() == before + 1

        await until(counted)
        assert sum((await by_replica(session, fleet, "vllm:num_requests_running")).values()) == 0

    run(test)


@needs_ray
@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_a_killed_replica_is_replaced_while_the_other_one_answers(fleet, victim):
    async def test(session: aiohttp.ClientSession) -> None:
        await grow(session, fleet)
        before = fleet.replicas()
        node, replica = next(iter(before.items()))
        [engine] = replica.children()
        (engine if victim == "engine" else replica).kill()
        answered = 0

        async def replaced() -> bool:
            nonlocal answered
            with suppress(aiohttp.ClientError, AssertionError):  # some still go to the dead one
                await stream(session, fleet, 4)
                answered += 1
            new = fleet.replicas().get(node, replica)
            if new == replica:
                return False
            with suppress(aiohttp.ClientError):
                return len(await by_replica(session, fleet, "vllm:num_requests_running")) == 2
            return False

        await until(replaced)
        assert answered > 0
        assert not engine.is_running()
        assert not replica.is_running()
        after = fleet.replicas()
        del before[node], after[node]
        assert after == before, "the other one was left alone"
        await asyncio.gather(*(stream(session, fleet, 4) for _ in range(8)))

    run(test)


@needs_ray
def test_told_to_end_it_finishes_its_streams_and_leaves_no_process(fleet):
    """The last test, as it ends the cluster."""

    async def test(session: aiohttp.ClientSession) -> None:
        begun = asyncio.Semaphore(0)
        choices = {"n": 8, "temperature": 1}  # which take a while
        streams = [asyncio.ensure_future(stream(session, fleet, begun=begun, **choices)) for _ in range(4)]
        for _ in streams:
            await begun.acquire()
        processes = fleet.processes()
        assert len(processes) > 4
        assert not any(each.done() for each in streams)
        assert await asyncio.to_thread(fleet.end) == 0
        await asyncio.gather(*streams)
        await until(lambda: not any(each.is_running() for each in processes))

    run(test)
