"""A bounded queue, and limits on how long a request may wait and run."""

import asyncio

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import QueueFullError, RequestTimeoutError
from vllm_teach.serving.async_engine.limits import ServingLimits

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_a_full_queue_refuses_and_takes_again(tiny_llm, gate, run_async, serving, read, until):
    async def serve():
        async with serving(tiny_llm, max_queue=3) as engine:
            gate.close()
            running = engine.submit([5, 6], SHORT)
            await until(lambda: tiny_llm.engine.exclusive._changing)  # in the step that the gate holds
            waiting = [engine.submit([5, index], SHORT) for index in (7, 8)]
            with pytest.raises(QueueFullError, match="max_queue=3"):
                engine.submit([5, 9], SHORT)
            gate.open()
            await asyncio.gather(*map(read, [running, *waiting]))
            return await engine.generate([5, 9], SHORT)

    assert run_async(serve()).finished


def test_one_that_is_given_up_in_a_long_step_leaves_its_place_in_the_queue(
    tiny_llm, gate, run_async, serving, read, until
):
    async def serve():
        async with serving(tiny_llm, max_queue=3) as engine:
            gate.close()
            running = engine.submit([5, 6], SHORT)
            await until(lambda: tiny_llm.engine.exclusive._changing)
            for index in range(3):  # of which the engine hears nothing before the step ends
                await engine.submit([5, 7 + index], SHORT).aclose()
            waiting = [engine.submit([6, index], SHORT) for index in (7, 8)]
            with pytest.raises(QueueFullError):
                engine.submit([6, 9], SHORT)
            gate.open()
            return await asyncio.gather(*map(read, [running, *waiting]))

    assert all(deltas[-1].finished for deltas in run_async(serve()))


def test_what_is_given_up_in_a_long_step_takes_no_more_memory_than_the_queue(
    tiny_llm, gate, run_async, serving, read, until
):
    async def serve():
        async with serving(tiny_llm, max_queue=3) as engine:
            gate.close()
            running = engine.submit([5, 6], SHORT)
            await until(lambda: tiny_llm.engine.exclusive._changing)
            for index in range(5):
                await engine.submit([5, 7 + index], SHORT).aclose()
            with pytest.raises(QueueFullError):
                engine.submit([5, 20], SHORT)
            gate.open()
            await read(running)
            return await engine.generate([5, 20], SHORT)

    assert run_async(serve()).finished


def test_waiting_too_long_ends_a_request_and_running_does_not(
    make_tiny_llm, run_async, make_gate, serving, read, until
):
    llm = make_tiny_llm(max_num_seqs=1)
    gate = make_gate(llm)

    async def serve():
        async with serving(llm) as engine:
            first = engine.submit([5, 6], LONG)
            await anext(first)
            gate.close()
            engine._session.limits = ServingLimits(queue_timeout=0.05)
            with pytest.raises(RequestTimeoutError, match=r"waited longer than queue_timeout=0\.05"):
                await engine.generate([5, 7], SHORT)
            gate.open()
            assert (await read(first))[-1].finished
            await until(lambda: len(engine.told.finished) == 2)
            return engine.told.finished

    assert {type(delta.error) for delta in run_async(serve())} == {RequestTimeoutError, type(None)}


def test_the_queue_timeout_is_nothing_to_a_request_that_runs(tiny_llm, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], LONG)
            await anext(stream)
            engine._session._expire(stream._request, "queue_timeout", 1.0)  # what the timer calls
            return await read(stream)

    assert run_async(serve())[-1].finished


def test_running_too_long_ends_a_request(tiny_llm, gate, run_async, serving, until):
    async def serve():
        async with serving(tiny_llm, request_timeout=0.05) as engine:
            gate.close()
            with pytest.raises(RequestTimeoutError, match=r"ran longer than request_timeout=0\.05"):
                await engine.generate([5, 6], LONG)
            gate.open()
            await until(lambda: engine.told.finished)
            return engine.told.finished

    (last,) = run_async(serve())
    assert type(last.error) is RequestTimeoutError
    assert last.metrics is not None
