"""What fails, breaks or hangs, and whose answers that takes with it."""

import asyncio
import threading

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineDeadError, EngineError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_a_failing_step_is_its_requests_error(tiny_llm, monkeypatch, run_async, serving):
    class Unportable(EngineError):
        def __init__(self, layer, lock):
            super().__init__(f"layer {layer} failed: send it again.")

    async def serve():
        async with serving(tiny_llm) as engine:
            with monkeypatch.context() as patch:

                def fail(plan):
                    raise Unportable(3, threading.Lock())

                patch.setattr(tiny_llm.engine.runner, "execute", fail)
                found = await asyncio.gather(
                    *(engine.generate([5, index], SHORT) for index in range(5, 8)), return_exceptions=True
                )
            engine.check_health()
            return found, await engine.generate([5, 6], SHORT)

    errors, after = run_async(serve())
    assert [str(error) for error in errors] == ["layer 3 failed: send it again."] * 3
    assert len(set(map(id, errors))) == 3
    assert all(isinstance(error, EngineError) for error in errors)
    assert after.finished


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), SystemExit(3), EngineError("x: y.")])
def test_when_the_loop_breaks_everything_in_flight_fails_and_nothing_hangs(
    tiny_llm, monkeypatch, run_async, error, serving, read
):
    schedule = tiny_llm.engine.scheduler.schedule

    def break_when_told():
        if broken:
            raise error
        return schedule()

    broken = []
    monkeypatch.setattr(tiny_llm.engine.scheduler, "schedule", break_when_told)

    async def serve():
        async with serving(tiny_llm) as engine:
            streams = [engine.submit([5, index], LONG) for index in range(5, 8)]
            unread = engine.submit([5, 9], LONG)
            await anext(streams[0])
            broken.append(1)
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            for call in (engine.check_health, lambda: engine.submit([5], SHORT), engine.reset_prefix_cache):
                with pytest.raises(EngineDeadError):
                    call()
            assert await engine.drain(1)
            with pytest.raises(EngineDeadError):
                await read(unread)
            return found, engine.told.finished

    found, finished = run_async(serve())
    assert [type(each) for each in found] == [EngineDeadError] * 3
    assert [type(delta.error) for delta in finished] == [EngineDeadError] * 4


def test_a_hang_is_noticed_and_when_it_ends_nothing_is_held(tiny_llm, gate, run_async, serving, read):
    async def serve():
        told = serving(tiny_llm, step_timeout=0.2)
        engine = told.engine
        await engine.start()
        gate.close()
        streams = [engine.submit([5, index], SHORT) for index in range(5, 8)]
        found = await asyncio.gather(*map(read, streams), return_exceptions=True)
        with pytest.raises(EngineDeadError, match=r"step_timeout=0\.2"):
            engine.check_health()
        await engine.stop()  # leaves the thread alone
        gate.open()
        return found, engine

    found, engine = run_async(serve())
    assert [type(each) for each in found] == [EngineDeadError] * 3
    engine._link.join()


def test_nobody_watches_an_idle_engine(tiny_llm, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], SHORT)
            assert engine._session._watch._timer is not None
            await read(stream)
            assert engine._session._watch._timer is None

    run_async(serve())


def test_a_failing_callback_takes_no_answer_with_it(tiny_llm):
    contexts = []

    def fail(argument):
        raise ZeroDivisionError

    async def serve():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
        engine = AsyncLLMEngine.of(tiny_llm, on_report=fail, on_finished=fail)
        await engine.start()
        try:
            return await engine.generate([5, 6], SHORT)
        finally:
            await engine.stop()

    assert asyncio.run(serve()).finished
    assert {type(context["exception"]) for context in contexts} == {ZeroDivisionError}
