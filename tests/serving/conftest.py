"""A small model, engines around it, an event loop to serve them in, and a look at what they leave behind."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import psutil
import pytest
import torch

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.models import resolve_model
from vllm_teach.models.load import load_model
from vllm_teach.models.tokenizer import load_tokenizer

T = TypeVar("T")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_parts() -> tuple[Any, Any]:
    """The offline model `tiny` in float32, whose answers do not depend on what runs beside them, and its tokenizer."""
    folder = resolve_model("tiny")
    return load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)


@pytest.fixture
def make_tiny_llm(tiny_parts: tuple[Any, Any]) -> Callable[..., LLM]:
    """Return LLM.from_loaded for `tiny`, with 200 blocks of 4 tokens unless told otherwise."""

    def make(**limits: Any) -> LLM:
        return LLM.from_loaded(*tiny_parts, **{"num_kv_blocks": 200, "block_size": 4, **limits})

    return make


@pytest.fixture
def tiny_llm(make_tiny_llm: Callable[..., LLM], assert_nothing_held: Callable[[LLMEngine], None]) -> Iterator[LLM]:
    """One of them; whatever the test does, nothing of a request may be left in it."""
    llm = make_tiny_llm()
    yield llm
    assert_nothing_held(llm.engine)


@pytest.fixture(scope="session")
def assert_nothing_held() -> Callable[[LLMEngine], None]:
    """Return a check that nothing of any request is left in an engine, however it ended."""

    def check(engine: LLMEngine) -> None:
        usage = engine.kv.usage()
        assert usage.held_blocks == usage.host_blocks_used == 0
        assert usage.idle_blocks + usage.free_blocks == usage.num_blocks
        assert not engine.has_unfinished_requests()
        assert not engine.scheduler.has_unfinished()

    return check


@pytest.fixture
def run_async() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Return asyncio.run with a limit of 60 seconds, after which a test hangs rather than waits.

    What reaches the loop's handler of exceptions, as a callback's failure does, fails the test.
    """

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        unhandled: list[dict[str, Any]] = []

        async def limited() -> T:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
            result = await asyncio.wait_for(coroutine, 60)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return result

        result = asyncio.run(limited())
        assert unhandled == []
        return result

    return run


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail the test if a thread of an engine, a process or a file descriptor is left when it is done."""

    def look() -> tuple[list[str], list[int], int]:
        gc.collect()
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-teach"))
        children = [child.pid for child in psutil.Process().children()]
        return names, children, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0

    before = look()
    yield
    assert look() == before
