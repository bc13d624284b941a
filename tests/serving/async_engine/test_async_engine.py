"""The engine in a thread: answers, aborts, limits and ends, as an event loop sees them."""

import asyncio
import gc
import random
import threading

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.limits import ServingLimits

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


class Serving:
    """`async with Serving(llm) as engine`: started, and stopped in the end; what it told is in `engine.told`."""

    def __init__(self, llm, **limits):
        self.finished, self.reports = [], []
        self.engine = AsyncLLMEngine.of(
            llm, ServingLimits(**limits), on_finished=self.finished.append, on_report=self.reports.append
        )

    async def __aenter__(self):
        await self.engine.start()
        self.engine.told = self
        return self.engine

    async def __aexit__(self, *error):
        await self.engine.stop()


class Gate:
    """Holds an engine in the midst of a step until it is opened."""

    def __init__(self, llm, monkeypatch):
        self._execute, self._open, self.closed = llm.engine.runner.execute, threading.Event(), False
        monkeypatch.setattr(llm.engine.runner, "execute", self._run)

    def _run(self, plan):
        if self.closed:
            assert self._open.wait(30)
        return self._execute(plan)

    def close(self):
        self._open.clear()
        self.closed = True

    def open(self):
        self.closed = False
        self._open.set()


@pytest.fixture
def gate(tiny_llm, monkeypatch):
    gate = Gate(tiny_llm, monkeypatch)
    yield gate
    gate.open()


async def read(stream):
    return [delta async for delta in stream]


async def until(condition):
    """Let the loop turn until `condition` holds; the test's own limit ends what never does."""
    while not condition():
        await asyncio.sleep(0.001)


def test_streams_and_whole_answers_are_the_offline_engines(tiny_llm, run_async):
    prompts = ["def f(x):", [5, 6, 7], {"prompt": "import os", "cache_salt": "s"}]
    params = [SamplingParams(n=2, seed=3, max_tokens=9), SamplingParams(seed=4, logprobs=1, max_tokens=5), SHORT]
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)
    tiny_llm.engine.reset_prefix_cache()

    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_thousand_requests_get_the_offline_answers_and_leave_nothing(make_tiny_llm, assert_nothing_held, run_async):
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 2000) for _ in range(draw.randrange(1, 20))] for _ in range(1000)]
    params = [SamplingParams(seed=index, max_tokens=draw.randrange(1, 8)) for index in range(1000)]
    expected = make_tiny_llm(num_kv_blocks=2000).generate(prompts, params, use_tqdm=False)
    llm = make_tiny_llm()  # a tenth of the blocks: requests wait and are preempted

    async def serve():
        async with Serving(llm, max_queue=1000) as engine:
            found = await asyncio.gather(*map(engine.generate, prompts, params))
            assert (engine.num_waiting, engine.num_running) == (0, 0)
        return found, len(engine.told.finished)

    found, num_finished = run_async(serve())
    assert [each.outputs for each in found] == [each.outputs for each in expected]
    assert num_finished == 1000
    assert_nothing_held(llm.engine)


def test_a_storm_of_aborts_harms_no_neighbour(make_tiny_llm, assert_nothing_held, run_async):
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
        async with Serving(llm, max_queue=1000) as engine:
            found = await asyncio.gather(*(read_some(engine, index) for index in range(300)))
            gc.collect()
            assert await engine.drain(30)
        return found, engine.told.finished

    found, finished = run_async(serve())
    assert found[::3] == [each.outputs for each in expected[::3]]
    assert len({delta.request_id for delta in finished}) == len(finished) == 300
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "leave"])
def test_whoever_goes_away_frees_the_blocks(tiny_llm, run_async, how):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_cancelled_reader_may_go_on(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            gate.close()
            stream = engine.submit([5, 6], SHORT)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            gate.open()
            return await read(stream)

    deltas = run_async(serve())
    assert sum(len(each.token_ids) for delta in deltas for each in delta.completions) == 4


def test_closing_wakes_whoever_waits(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_slow_reader_gets_several_steps_in_one(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], LONG)
            await until(lambda: engine.told.finished)
            return await read(stream)

    (delta,) = run_async(serve())
    assert delta.finished
    assert len(delta.completions[0].token_ids) == 60


def test_the_loop_is_free_while_a_step_runs(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            gate.close()
            streams = [engine.submit([5, 6, index], SHORT) for index in range(5, 205)]  # nobody takes them yet
            engine.check_health()
            await asyncio.sleep(0)
            assert engine.num_waiting == 200
            gate.open()
            return [await read(stream) for stream in streams]

    assert all(deltas[-1].finished for deltas in run_async(serve()))


def test_bad_requests_are_refused_at_once_and_queue_nothing(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_name_is_taken_until_the_engine_has_let_go_of_it(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_full_queue_refuses_and_takes_again(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm, max_queue=3) as engine:
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


def test_waiting_too_long_ends_a_request_and_running_does_not(make_tiny_llm, monkeypatch, run_async):
    llm = make_tiny_llm(max_num_seqs=1)
    gate = Gate(llm, monkeypatch)

    async def serve():
        async with Serving(llm) as engine:
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


def test_the_queue_timeout_is_nothing_to_a_request_that_runs(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], LONG)
            await anext(stream)
            engine._session._expire(stream._request, "queue_timeout", 1.0)  # what the timer calls
            return await read(stream)

    assert run_async(serve())[-1].finished


def test_running_too_long_ends_a_request(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm, request_timeout=0.05) as engine:
            gate.close()
            with pytest.raises(RequestTimeoutError, match=r"ran longer than request_timeout=0\.05"):
                await engine.generate([5, 6], LONG)
            gate.open()
            await until(lambda: engine.told.finished)
            return engine.told.finished

    (last,) = run_async(serve())
    assert type(last.error) is RequestTimeoutError
    assert last.metrics is not None


def test_a_request_waits_while_somebody_else_uses_the_llm(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_failing_step_is_its_requests_error(tiny_llm, monkeypatch, run_async):
    class Unportable(EngineError):
        def __init__(self, layer, lock):
            super().__init__(f"layer {layer} failed: send it again.")

    async def serve():
        async with Serving(tiny_llm) as engine:
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
def test_when_the_loop_breaks_everything_in_flight_fails_and_nothing_hangs(tiny_llm, monkeypatch, run_async, error):
    schedule = tiny_llm.engine.scheduler.schedule

    def break_when_told():
        if broken:
            raise error
        return schedule()

    broken = []
    monkeypatch.setattr(tiny_llm.engine.scheduler, "schedule", break_when_told)

    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_a_hang_is_noticed_and_when_it_ends_nothing_is_held(tiny_llm, gate, run_async):
    async def serve():
        serving = Serving(tiny_llm, step_timeout=0.2)
        engine = serving.engine
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


def test_nobody_watches_an_idle_engine(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], SHORT)
            assert engine._session._watch._timer is not None
            await read(stream)
            assert engine._session._watch._timer is None

    run_async(serve())


def test_draining_refuses_and_waits(tiny_llm, gate, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
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


def test_draining_does_not_wait_for_a_reader(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            stream = engine.submit([5, 6], SHORT)
            assert await engine.drain(30)
            return await read(stream)

    assert run_async(serve())[-1].finished


def test_stopping_ends_what_is_in_flight(tiny_llm, run_async):
    async def serve():
        serving = Serving(tiny_llm)
        engine = serving.engine
        await engine.start()
        stream = engine.submit([5, 6], LONG)
        await anext(stream)
        await asyncio.gather(engine.stop(), engine.stop())
        with pytest.raises(EngineDeadError, match="stopped"):
            await read(stream)
        with pytest.raises(EngineDeadError, match="stopped"):
            engine.check_health()
        return serving.finished

    assert [type(delta.error) for delta in run_async(serve())] == [EngineDeadError]


def test_an_llm_can_be_served_again_and_again(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:
            return (await engine.generate([5, 6], SHORT)).outputs

    assert run_async(serve()) == run_async(serve()) == tiny_llm.generate([5, 6], SHORT, use_tqdm=False)[0].outputs


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


def test_another_event_loop_is_told_so(tiny_llm, run_async):
    async def serve():
        async with Serving(tiny_llm) as engine:

            def elsewhere():
                async def submit():
                    engine.submit([5], SHORT)

                with pytest.raises(InvalidArgumentError, match="another event loop"):
                    asyncio.run(submit())

            await asyncio.to_thread(elsewhere)

    run_async(serve())


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
