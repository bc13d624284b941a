"""The engine in a thread: its answers, as an event loop gets them, are the offline engine's."""

import asyncio
import random

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_streams_and_whole_answers_are_the_offline_engines(tiny_llm, run_async, serving, read):
    prompts = ["def f(x):", [5, 6, 7], {"prompt": "import os", "cache_salt": "s"}]
    params = [SamplingParams(n=2, seed=3, max_tokens=9), SamplingParams(seed=4, logprobs=1, max_tokens=5), SHORT]
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)
    tiny_llm.engine.reset_prefix_cache()

    async def serve():
        async with serving(tiny_llm) as engine:
            whole = await asyncio.gather(*map(engine.generate, prompts, params))
            streamed = await read(engine.submit(prompts[0], params[0], request_id="mine"))
        return whole, streamed, engine.told

    whole, streamed, told = run_async(serve())
    for found, wanted in zip(whole, expected, strict=True):
        assert [(each.text, each.token_ids, each.finish_reason) for each in found.outputs] == [
            (each.text, each.token_ids, each.finish_reason) for each in wanted.outputs
        ]
        assert (found.prompt, found.prompt_token_ids, found.finished) == (wanted.prompt, wanted.prompt_token_ids, True)
        assert found.metrics.e2e_latency > 0
    assert whole[1].outputs[0].cumulative_logprob == pytest.approx(expected[1].outputs[0].cumulative_logprob, abs=1e-4)
    for index in range(2):
        pieces = [each.text for delta in streamed for each in delta.completions if each.index == index]
        assert "".join(pieces) == expected[0].outputs[index].text
    assert {delta.request_id for delta in streamed} == {"mine"}
    assert [delta.finished for delta in streamed] == [False] * (len(streamed) - 1) + [True]
    assert len(told.finished) == 4
    assert sum(delta.num_generation_tokens for delta in told.finished) == 9 * 4 + 5 + 4
    assert told.reports[-1].running == 0


def test_a_thousand_requests_get_the_offline_answers_and_leave_nothing(
    make_tiny_llm, assert_nothing_held, run_async, serving
):
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 2000) for _ in range(draw.randrange(1, 20))] for _ in range(1000)]
    params = [SamplingParams(seed=index, max_tokens=draw.randrange(1, 8)) for index in range(1000)]
    expected = make_tiny_llm(num_kv_blocks=2000).generate(prompts, params, use_tqdm=False)
    llm = make_tiny_llm()  # a tenth of the blocks: requests wait and are preempted

    async def serve():
        async with serving(llm, max_queue=1000) as engine:
            found = await asyncio.gather(*map(engine.generate, prompts, params))
            assert (engine.num_waiting, engine.num_running) == (0, 0)
        return found, len(engine.told.finished)

    found, num_finished = run_async(serve())
    assert [each.outputs for each in found] == [each.outputs for each in expected]
    assert num_finished == 1000
    assert_nothing_held(llm.engine)


def test_a_slow_reader_gets_several_steps_in_one(tiny_llm, run_async, serving, read, until):
    async def serve():
        async with serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], LONG)
            await until(lambda: engine.told.finished)
            return await read(stream)

    (delta,) = run_async(serve())
    assert delta.finished
    assert len(delta.completions[0].token_ids) == 60


def test_the_loop_is_free_while_a_step_runs(tiny_llm, gate, run_async, serving, read):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            streams = [engine.submit([5, 6, index], SHORT) for index in range(5, 205)]  # nobody takes them yet
            engine.check_health()
            await asyncio.sleep(0)
            assert engine.num_waiting == 200
            gate.open()
            return [await read(stream) for stream in streams]

    assert all(deltas[-1].finished for deltas in run_async(serve()))


def test_bad_requests_are_refused_at_once_and_queue_nothing(tiny_llm, run_async, serving):
    async def serve():
        async with serving(tiny_llm) as engine:
            for prompt, params, more, kind in [
                ([], SHORT, {}, InvalidArgumentError),
                ([10**6], SHORT, {}, InvalidArgumentError),
                ([5] * 10**6, SHORT, {}, PromptTooLongError),
                ("x " * 2000, SHORT, {}, PromptTooLongError),
                ("\ud800", SHORT, {}, InvalidArgumentError),
                ([5], {"max_tokens": 3}, {}, InvalidArgumentError),
                ([5], SamplingParams(stop_token_ids=[10**6]), {}, InvalidArgumentError),
                ([5], SHORT, {"priority": "high"}, InvalidArgumentError),
                ([5], SHORT, {"request_id": 7}, InvalidArgumentError),
            ]:
                with pytest.raises(kind):
                    engine.submit(prompt, params, **more)
            assert (engine.num_waiting, engine.num_running) == (0, 0)

    run_async(serve())


def test_a_request_waits_while_somebody_else_uses_the_llm(tiny_llm, gate, run_async, serving, read, until):
    async def serve():
        async with serving(tiny_llm) as engine:
            gate.close()
            other = asyncio.create_task(asyncio.to_thread(tiny_llm.generate, [5, 6], SHORT, use_tqdm=False))
            await until(lambda: tiny_llm.engine.exclusive._changing)
            stream = engine.submit([5, 7], SHORT)
            await asyncio.sleep(0.05)
            engine.check_health()
            gate.open()
            return await other, await read(stream)

    (output,), deltas = run_async(serve())
    assert output.finished
    assert deltas[-1].finished


def test_an_llm_can_be_served_again_and_again(tiny_llm, run_async, serving):
    async def serve():
        async with serving(tiny_llm) as engine:
            return (await engine.generate([5, 6], SHORT)).outputs

    assert run_async(serve()) == run_async(serve()) == tiny_llm.generate([5, 6], SHORT, use_tqdm=False)[0].outputs
