"""How an engine is started, drained, stopped, or forgotten."""

import asyncio
import gc

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_nothing_works_before_the_start_or_after_a_second_one(tiny_llm, run_async):
    async def serve():
        engine = AsyncLLMEngine.of(tiny_llm)
        for call in (engine.check_health, lambda: engine.ready, lambda: engine.submit([5], SHORT)):
            with pytest.raises(EngineDeadError, match="not started"):
                call()
        await engine.start()
        with pytest.raises(InvalidArgumentError, match="make another one"):
            await engine.start()
        await engine.stop()
        stopped = AsyncLLMEngine.of(tiny_llm)
        await stopped.stop()
        with pytest.raises(InvalidArgumentError, match="make another one"):
            await stopped.start()

    run_async(serve())


def test_another_event_loop_is_told_so(tiny_llm, run_async, serving):
    async def serve():
        async with serving(tiny_llm) as engine:

            def elsewhere():
                async def submit():
                    engine.submit([5], SHORT)

                with pytest.raises(InvalidArgumentError, match="another event loop"):
                    asyncio.run(submit())

            await asyncio.to_thread(elsewhere)

    run_async(serve())


def test_draining_refuses_and_waits(tiny_llm, gate, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            stream = engine.submit([5, 6], SHORT)
            assert not await engine.drain(0.01)
            assert engine.draining
            engine.check_health()
            with pytest.raises(EngineDeadError, match="takes no new requests"):
                engine.submit([5, 7], SHORT)
            gate.open()
            assert await engine.drain(None)
            return await read(stream)

    assert run_async(serve())[-1].finished


def test_draining_does_not_wait_for_a_reader(tiny_llm, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], SHORT)
            assert await engine.drain(30)
            return await read(stream)

    assert run_async(serve())[-1].finished


def test_stopping_ends_what_is_in_flight(tiny_llm, run_async, serving, read):
    async def serve():
        told = serving(tiny_llm)
        engine = told.engine
        await engine.start()
        stream = engine.submit([5, 6], LONG)
        await anext(stream)
        await asyncio.gather(engine.stop(), engine.stop())
        with pytest.raises(EngineDeadError, match="stopped"):
            await read(stream)
        with pytest.raises(EngineDeadError, match="stopped"):
            engine.check_health()
        return told.finished

    assert [type(delta.error) for delta in run_async(serve())] == [EngineDeadError]


def test_a_loop_that_is_closed_early_ends_the_engine(tiny_llm, gate):
    async def leave():
        engine = AsyncLLMEngine.of(tiny_llm)
        await engine.start()
        gate.close()
        return engine, engine.submit([5, 6], LONG)

    engine, stream = asyncio.run(leave())
    gate.open()
    engine._link.join()  # by itself, though engine and stream are still there
    del stream


def test_an_engine_that_is_dropped_ends(tiny_llm):
    async def leave():
        engine = AsyncLLMEngine.of(tiny_llm)
        await engine.start()
        await engine.generate([5, 6], SHORT)
        return engine._link

    link = asyncio.run(leave())
    gc.collect()
    link.join()
