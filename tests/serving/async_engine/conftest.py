"""An engine that is served for as long as a block is open, and one that can be held in the midst of a step."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.limits import ServingLimits


class Serving:
    """`async with Serving(llm) as engine`: started, and stopped in the end; what it told is in `engine.told`."""

    def __init__(self, llm: LLM, **limits: Any) -> None:
        self.finished, self.reports = [], []
        self.engine = AsyncLLMEngine.of(
            llm, ServingLimits(**limits), on_finished=self.finished.append, on_report=self.reports.append
        )

    async def __aenter__(self) -> AsyncLLMEngine:
        await self.engine.start()
        self.engine.told = self
        return self.engine

    async def __aexit__(self, *error: object) -> None:
        await self.engine.stop()


class Gate:
    """Holds an engine in the midst of a step until it is opened."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._execute, self._open, self.closed = llm.engine.runner.execute, threading.Event(), False
        monkeypatch.setattr(llm.engine.runner, "execute", self._run)

    def _run(self, plan: Plan) -> StepResult:
        if self.closed:
            assert self._open.wait(30)
        return self._execute(plan)

    def close(self) -> None:
        self._open.clear()
        self.closed = True

    def open(self) -> None:
        self.closed = False
        self._open.set()


@pytest.fixture(scope="session")
def serving() -> type[Serving]:
    return Serving


@pytest.fixture
def make_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LLM], Gate]]:
    gates = []

    def make(llm: LLM) -> Gate:
        gates.append(Gate(llm, monkeypatch))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@pytest.fixture
def gate(tiny_llm: LLM, make_gate: Callable[[LLM], Gate]) -> Gate:
    return make_gate(tiny_llm)


@pytest.fixture(scope="session")
def read() -> Callable[..., Any]:
    """Return a coroutine function that reads a stream to its end."""

    async def read_all(stream: AsyncIterator[Any]) -> list[Any]:
        return [delta async for delta in stream]

    return read_all


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Return a coroutine function that lets the loop turn until a condition holds; `run_async` ends what never does."""

    async def wait(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    return wait
