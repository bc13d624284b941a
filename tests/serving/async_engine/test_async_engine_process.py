"""The engine in a process of its own: what crosses the pipe, how it starts, and all the ways in which it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import EngineDeadError, EngineError, InvalidArgumentError, ModelNotFoundError
from vllm_teach.openmp import WAIT_SHORTLY
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.limits import ServingLimits

ARGUMENTS = {"dtype": "float32", "num_kv_blocks": 400}
SHORT = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)


class _DiesWhenRead:
    """Unpickled, it ends the process with exit code 3."""

    def __reduce__(self):
        return os._exit, (3,)


class _SleepsWhenRead:
    def __reduce__(self):
        return time.sleep, (1000,)


@pytest.fixture(scope="module")
def served():
    """An event loop, an engine in a process that serves in it, and the list of what `on_finished` got."""
    finished = []
    engine = AsyncLLMEngine.spawn("tiny", ARGUMENTS, ServingLimits(max_queue=1000), on_finished=finished.append)
    with asyncio.Runner() as runner:
        with pytest.MonkeyPatch.context() as environment:
            for name in WAIT_SHORTLY:
                environment.delenv(name, raising=False)
            runner.run(engine.start())
        yield runner, engine, finished
        runner.run(engine.stop())


@pytest.fixture
def child(served):
    """The engine's process."""
    return psutil.Process(served[1]._link.pid)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def read(stream):
    return [delta async for delta in stream]


def gone(pid):
    """Wait until a process that need not be a child has ended."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    return process.status() == psutil.STATUS_ZOMBIE or not psutil.wait_procs([process], timeout=30)[1]


def test_answers_are_the_offline_engines(served):
    runner, engine, _ = served
    prompts = [[5 + index, 6, 7] for index in range(40)]
    params = [SamplingParams(seed=index, max_tokens=1 + index % 9, n=1 + index % 2) for index in range(40)]
    expected = LLM("tiny", **ARGUMENTS).generate(prompts, params, use_tqdm=False)

    async def generate():
        return await asyncio.gather(*map(engine.generate, prompts, params))

    assert [each.outputs for each in runner.run(generate())] == [each.outputs for each in expected]


def test_an_answer_larger_than_any_pipe_arrives_while_the_server_sleeps(served):
    runner, engine, _ = served
    every = SamplingParams(max_tokens=6, logprobs=-1, prompt_logprobs=-1, temperature=0, ignore_eos=True)

    async def generate():
        tasks = [asyncio.create_task(engine.generate(list(range(5, 9)), every)) for _ in range(2)]
        await until(lambda: engine.num_running)
        time.sleep(1.0)  # the event loop hears nothing, and the pipe fills up
        return await asyncio.gather(*tasks)

    for output in runner.run(generate()):
        (completion,) = output.outputs
        assert [len(entry) for entry in completion.logprobs] == [engine.ready.vocab_size] * 6
        assert [len(entry) for entry in output.prompt_logprobs[1:]] == [engine.ready.vocab_size] * 3


def test_requests_of_more_bytes_than_a_pipe_holds_wait_for_an_engine_that_sleeps(served, child):
    runner, engine, finished = served

    async def serve():
        child.suspend()
        try:
            streams = [engine.submit([1000 + index] * 500, SHORT) for index in range(300)]
            assert engine.num_waiting == 300
            for stream in streams:  # to compute them all would take long
                await stream.aclose()
        finally:
            child.resume()
        before = len(finished)
        await until(lambda: engine.num_waiting + engine.num_running == 0)
        return before, await engine.generate([5, 6], SHORT)

    before, output = runner.run(serve())
    assert len(finished) == before + 301
    assert output.finished


def test_signals_to_the_process_are_left_to_the_server(served, child):
    runner, engine, _ = served

    async def serve():
        stream = engine.submit([5, 6], SHORT)
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)
        await read(stream)
        return await engine.generate([5, 6], SHORT)

    assert runner.run(serve()).finished


def test_threads_of_the_process_wait_shortly_where_the_user_has_no_say(child):
    assert child.environ().items() >= WAIT_SHORTLY.items()


def test_an_abort_crosses_over_and_is_confirmed(served):
    runner, engine, finished = served

    async def serve():
        stream = engine.submit([5, 6], LONG, request_id="left")
        await anext(stream)
        await stream.aclose()
        await until(lambda: any(delta.request_id == "left" for delta in finished))

    runner.run(serve())
    (last,) = [delta for delta in finished if delta.request_id == "left"]
    assert last.completions[0].finish_reason == "abort"
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_what_cannot_be_sent_is_refused_at_once(served):
    runner, engine, _ = served

    class LocalParams(SamplingParams):
        """Known to nobody else."""

    async def serve():
        with pytest.raises(InvalidArgumentError, match="cannot be sent"):
            engine.submit([5, 6], LocalParams())
        assert engine.num_waiting == 0
        return await engine.generate([5, 6], SHORT)

    assert runner.run(serve()).finished
    with pytest.raises(InvalidArgumentError, match="engine_args"):
        AsyncLLMEngine.spawn("tiny", {"attention_pattern": lambda: None})


@pytest.mark.usefixtures("nothing_left")
class TestEnds:
    """Each with a process of its own."""

    def test_killed_under_load(self, run_async):
        async def serve():
            engine = AsyncLLMEngine.spawn("tiny", ARGUMENTS)
            await engine.start()
            tasks = [asyncio.create_task(read(engine.submit([5, index], LONG))) for index in range(5, 105)]
            await until(lambda: engine.num_running)
            psutil.Process(engine._link.pid).kill()
            # Nothing has been heard of its end yet.
            tasks += [asyncio.create_task(read(engine.submit([6, index], LONG))) for index in range(5, 10)]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EngineDeadError, match="signal 9"):
                engine.check_health()
            with pytest.raises(EngineDeadError, match="signal 9"):
                engine.submit([5], SHORT)
            await engine.stop()
            return found

        found = run_async(serve())
        assert {type(each) for each in found} == {EngineDeadError}
        assert len(set(map(id, found))) == 105

    def test_a_step_that_fails_with_an_error_that_cannot_be_pickled_and_then_one_that_never_ends(
        self, run_async, tmp_path, monkeypatch
    ):
        module = """
            import threading, time
            from pathlib import Path
            from vllm_teach.attention.patterns import Causal
            from vllm_teach.errors import EngineError

            class Unportable(EngineError):
                def __init__(self, layer, lock):
                    super().__init__(f"layer {layer} failed: send it again.")
                    self.lock = lock

            class Moody(Causal):
                def sees(self, q_pos, k_pos):
                    if Path(__file__).with_name("fail").exists():
                        raise Unportable(3, threading.Lock())
                    while Path(__file__).with_name("hang").exists():
                        time.sleep(1)
                    return super().sees(q_pos, k_pos)
        """
        (tmp_path / "moody_pattern.py").write_text(textwrap.dedent(module))
        monkeypatch.syspath_prepend(tmp_path)
        from moody_pattern import Moody

        async def serve():
            arguments = {**ARGUMENTS, "attention_pattern": Moody(), "attention_backend": "naive"}
            engine = AsyncLLMEngine.spawn("tiny", arguments, ServingLimits(step_timeout=10))
            await engine.start()
            await engine.generate([5, 6], SHORT)
            (tmp_path / "fail").touch()
            with pytest.raises(EngineError, match="layer 3 failed") as caught:
                await engine.generate([5, 6], SHORT)
            (tmp_path / "fail").unlink()
            assert type(caught.value) is EngineError
            engine.check_health()
            await engine.generate([5, 6], SHORT)
            (tmp_path / "hang").touch()
            with pytest.raises(EngineDeadError, match="step_timeout=10"):
                await engine.generate([5, 6], SHORT)
            await engine.stop()

        run_async(serve())

    @pytest.mark.parametrize(
        ("model", "arguments", "kind", "said"),
        [
            ("no/such/folder", {}, ModelNotFoundError, "no/such/folder"),
            ("tiny", {"max_model_len": 1}, InvalidArgumentError, "max_model_len=1 is not valid"),
            ("tiny", {"blocksize": 4}, InvalidArgumentError, "blocksize"),
            ("tiny", {"seed": _DiesWhenRead()}, EngineDeadError, "exit code 3"),
        ],
    )
    def test_what_fails_in_starting_comes_out_of_start(self, run_async, model, arguments, kind, said):
        async def serve():
            engine = AsyncLLMEngine.spawn(model, arguments)
            with pytest.raises(kind, match=said) as caught:
                await engine.start()
            assert type(caught.value) is kind
            with pytest.raises(EngineDeadError, match=said):
                engine.check_health()
            with pytest.raises(EngineDeadError, match="has not started"):
                engine.ready

        run_async(serve())

    def test_a_start_that_is_cancelled(self, run_async):
        async def serve():
            engine = AsyncLLMEngine.spawn("tiny", {"seed": _SleepsWhenRead()})
            starting = asyncio.create_task(engine.start())
            await until(lambda: engine._link.pid is not None)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            with pytest.raises(EngineDeadError):
                engine.check_health()
            with pytest.raises(EngineDeadError):
                engine.ready

        run_async(serve())


SCRIPT = """
import asyncio, os, signal, sys
from vllm_teach import SamplingParams
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

async def main():
    global engine
    engine = AsyncLLMEngine.spawn("tiny", {"num_kv_blocks": 100})
    await engine.start()
    output = await engine.generate([5, 6], SamplingParams(max_tokens=3))
    print(len(output.outputs[0].token_ids), engine._link.pid, flush=True)

"""


@pytest.mark.parametrize("how", ["-c", "stdin", "file"])
def test_a_program_of_any_kind_spawns_and_one_that_forgets_to_stop_leaves_nothing(tmp_path, how):
    program = SCRIPT + "asyncio.run(main())\n"  # without a guard: it is not run again in the engine's process
    file = tmp_path / "program.py"
    file.write_text(program)
    (tmp_path / "queue.py").write_text("this is no module of anybody's")
    arguments = {"-c": ["-c", program], "stdin": ["-"], "file": [file]}[how]
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        input=program if how == "stdin" else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    count, pid = done.stdout.split()
    assert count == "3"
    assert gone(int(pid))


HANGING = """
import time

class Sleeps:
    def __reduce__(self):
        return time.sleep, (1000,)

async def main():
    global engine
    engine = AsyncLLMEngine.spawn("tiny", {"seed": Sleeps()})
    starting = asyncio.create_task(engine.start())
    while engine._link.pid is None:
        await asyncio.sleep(0.01)
    print(0, engine._link.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

"""


@pytest.mark.parametrize("state", ["idle", "hanging"])
def test_a_program_that_is_killed_takes_its_engine_with_it(state):
    hanging = HANGING if state == "hanging" else ""
    program = SCRIPT + hanging + "asyncio.run(main())\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout.split()[1]))
