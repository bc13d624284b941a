"""Readers that go away: their requests end, their neighbours do not."""

import asyncio
import gc
import random

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_a_storm_of_aborts_harms_no_neighbour(make_tiny_llm, assert_nothing_held, run_async, serving):
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 2000) for _ in range(draw.randrange(1, 30))] for _ in range(300)]
    params = [SamplingParams(seed=index, max_tokens=draw.randrange(1, 20), ignore_eos=True) for index in range(300)]
    expected = make_tiny_llm(num_kv_blocks=2000).generate(prompts, params, use_tqdm=False)
    llm = make_tiny_llm(num_kv_blocks=60)

    async def read_some(engine, index):
        """Read all of every third; of the others some, and then cancel, close or drop the stream."""
        if index % 3 == 0:
            return (await engine.generate(prompts[index], params[index])).outputs
        stream = engine.submit(prompts[index], params[index])
        for _ in range(draw.randrange(4)):
            await anext(stream, None)
        if index % 3 == 1:
            await stream.aclose()
        return None

    async def serve():
        async with serving(llm, max_queue=1000) as engine:
            found = await asyncio.gather(*(read_some(engine, index) for index in range(300)))
            gc.collect()
            assert await engine.drain(30)
        return found, engine.told.finished

    found, finished = run_async(serve())
    assert found[::3] == [each.outputs for each in expected[::3]]
    assert len({delta.request_id for delta in finished}) == len(finished) == 300
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "leave"])
def test_whoever_goes_away_frees_the_blocks(tiny_llm, run_async, how, serving, read, until):
    async def serve():
        async with serving(tiny_llm) as engine:
            if how == "cancel":
                task = asyncio.create_task(engine.generate([5, 6], LONG))
                await until(lambda: engine.num_running)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = engine.submit([5, 6], LONG)
                await anext(stream)
                if how == "close":
                    await stream.aclose()
                    await stream.aclose()
                    assert await read(stream) == []
                elif how == "leave":
                    async with stream:
                        await anext(stream)
                del stream
            await until(lambda: engine.told.finished)
            return engine.told.finished, tiny_llm.engine.kv.usage().held_blocks, engine.num_running

    (last,), held, running = run_async(serve())
    assert (last.completions[0].finish_reason, last.error, held, running) == ("abort", None, 0, 0)
    assert 0 < last.num_generation_tokens < 60


def test_a_cancelled_reader_may_go_on(tiny_llm, gate, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            stream = engine.submit([5, 6], SHORT)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            gate.open()
            return await read(stream)

    deltas = run_async(serve())
    assert sum(len(each.token_ids) for delta in deltas for each in delta.completions) == 4


def test_closing_wakes_whoever_waits(tiny_llm, gate, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            stream = engine.submit([5, 6], SHORT)
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            with pytest.raises(InvalidArgumentError, match="another task"):
                await anext(stream)
            await stream.aclose()
            assert await reader == []
            gate.open()

    run_async(serve())


def test_a_name_is_taken_until_the_engine_has_let_go_of_it(tiny_llm, gate, run_async, serving, until):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            first = engine.submit([5, 6], LONG, request_id="same")
            with pytest.raises(InvalidArgumentError, match="in use"):
                engine.submit([5, 6], SHORT, request_id="same")
            await first.aclose()
            with pytest.raises(InvalidArgumentError, match="in use"):
                engine.submit([5, 6], SHORT, request_id="same")
            gate.open()
            await until(lambda: engine.told.finished)
            return await engine.generate([5, 6], SHORT, request_id="same")

    assert len(run_async(serve()).outputs[0].token_ids) == 4
