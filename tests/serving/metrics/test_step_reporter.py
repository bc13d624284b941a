"""What an engine says of itself, and that measuring takes a bounded part of its time."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.serving.metrics.step_reporter import BLOCK_LOOK_SHARE, MEMORY_INTERVAL, StepReporter


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", max_model_len=64, num_kv_blocks=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_new_engine_has_done_nothing(llm: LLM) -> None:
    report = StepReporter(LLM.from_loaded(llm.model, llm.tokenizer, num_kv_blocks=40).engine).report()
    assert (report.step, report.seconds, report.running, report.generation_tokens) == (0, 0, 0, 0)
    assert sum(report.step_tokens.counts) == 0
    assert report.usage.free_blocks == 40
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_report_tells_of_the_last_step_and_of_all(llm: LLM) -> None:
    reporter = StepReporter(llm.engine)
    before = reporter.report()
    llm.engine.add_request([5] * 10, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.engine.step()
    first = reporter.report()
    assert (first.prefill_tokens, first.decode_tokens, first.running) == (10, 0, 1)
    assert first.usage.held_blocks == 1
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    last = reporter.report()
    assert (last.prefill_tokens, last.decode_tokens, last.running) == (0, 1, 0)
    assert last.step - before.step == 3
    assert last.generation_tokens - before.generation_tokens == 3
    assert last.usage.held_blocks == 0
    assert before.engine_id == last.engine_id != StepReporter(llm.engine).engine_id


def test_completions_that_branch_off_later_wait(llm: LLM) -> None:
    reporter, waits = StepReporter(llm.engine), []
    for prompt in ([7] * 10, [8] * 10):
        llm.engine.add_request(prompt, SamplingParams(n=3, seed=1, max_tokens=2, ignore_eos=True))
    while llm.engine.has_unfinished_requests():
        report = reporter.report()
        waits.append((report.waiting, report.running))
        llm.engine.step()
    assert waits == [(6, 0), (0, 6)]


def test_looks_at_all_blocks_take_a_bounded_part_of_the_time(llm: LLM, monkeypatch) -> None:
    clock, looks, look = Clock(), [], llm.engine.kv.usage

    def slow_look():
        looks.append(clock.now)
        clock.now += 0.5
        return look()

    monkeypatch.setattr(llm.engine.kv, "usage", slow_look)
    reporter = StepReporter(llm.engine, clock=clock)
    while clock.now < 2000:
        clock.now += 0.1
        reporter.report()
    assert len(looks) * 0.5 / clock.now <= 2 * BLOCK_LOOK_SHARE
    assert len(looks) > 4


def test_between_two_looks_the_figures_that_need_none_are_up_to_date(llm: LLM, monkeypatch) -> None:
    clock, look = Clock(), llm.engine.kv.usage

    def slow_look():
        clock.now += 1
        return look()

    monkeypatch.setattr(llm.engine.kv, "usage", slow_look)
    reporter = StepReporter(llm.engine, clock=clock)
    reporter.report()
    llm.engine.add_request([6] * 30, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.engine.step()
    between, anew = reporter.report().usage, look()
    assert between.held_blocks == anew.held_blocks == 2
    assert (between.free_blocks, between.idle_blocks) == (anew.free_blocks, anew.idle_blocks)
    assert (between.hit_queries, between.hit_tokens) == (anew.hit_queries, anew.hit_tokens)
    assert between.tokens_stored == 0 != anew.tokens_stored
    clock.now += 1000
    assert reporter.report().usage == anew
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    idle = reporter.report().usage
    assert (idle.held_blocks, idle.tokens_stored, idle.slots_held, idle.internal_fragmentation) == (0, 0, 0, 0)


def test_memory_is_that_of_all_the_engines_processes_and_measured_once_a_second(llm: LLM, monkeypatch) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        clock, ranks = Clock(), SimpleNamespace(processes=SimpleNamespace(pids=[worker.pid]))
        monkeypatch.setattr(llm.engine, "ranks", ranks)
        reporter = StepReporter(llm.engine, clock)
        together, alone = reporter.report().memory_bytes, psutil.Process().memory_info().rss
        assert alone < together < alone + 2**30
        worker.stdin.close()
        worker.wait()
        assert reporter.report().memory_bytes == together
        clock.now += MEMORY_INTERVAL
        assert reporter.report().memory_bytes == pytest.approx(alone, rel=0.1)
