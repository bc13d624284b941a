"""The server's engine over two ranks: it answers as one rank does, and a rank's death is the engine's."""

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import EngineDeadError
from vllm_teach.parallel.worker_processes import PROGRAM
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

PROMPT = {"prompt_token_ids": [1, 2, 3]}
ARGUMENTS = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "attention_backend": "sdpa"}
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ranks() -> list[psutil.Process]:
    """The worker processes of ranks, among this process's descendants."""
    return [each for each in psutil.Process().children(recursive=True) if PROGRAM in each.cmdline()]


def in_a_process() -> AsyncLLMEngine:
    return AsyncLLMEngine.spawn("tiny", {**ARGUMENTS, "tensor_parallel_size": 2})


def in_a_thread() -> AsyncLLMEngine:
    return AsyncLLMEngine.of(LLM("tiny", tensor_parallel_size=2, **ARGUMENTS))


async def served(make: Callable[[], AsyncLLMEngine], use: Callable[[AsyncLLMEngine], Any]) -> None:
    engine = make()
    try:
        await engine.start()
        await use(engine)
    finally:
        await engine.stop()
        for each in ranks():
            each.wait(20)


@pytest.mark.parametrize("make", [in_a_process, in_a_thread])
def test_answers_and_a_death_in_the_midst_of_a_stream(make: Callable[[], AsyncLLMEngine]) -> None:
    expected = LLM("tiny", **ARGUMENTS).generate([PROMPT], SHORT, use_tqdm=False)[0].outputs[0].token_ids

    async def use(engine: AsyncLLMEngine) -> None:
        output = await engine.generate(PROMPT, SHORT)
        assert output.outputs[0].token_ids == expected
        (worker,) = ranks()
        stream = engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))

        async def read() -> None:
            async for _ in stream:
                worker.kill()

        with pytest.raises(EngineDeadError, match=r"worker of rank 1 .* was killed by signal 9"):
            await read()
        with pytest.raises(EngineDeadError):
            engine.check_health()

    asyncio.run(served(make, use))


def test_a_death_while_nothing_is_asked() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.generate(PROMPT, SHORT)
        engine.check_health()
        ranks()[0].kill()
        for _ in range(400):
            try:
                engine.check_health()
            except EngineDeadError:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the engine never noticed")

    asyncio.run(served(in_a_process, use))
