"""One LLM serves one thread at a time; a second one is told so and breaks nothing."""

import threading

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineError

PARAMS = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)


def inside_a_step(llm, monkeypatch, call):
    """Return a list that gets what `call` raised, run in a thread of its own while this one is inside a step."""
    execute, started, raised = llm.engine.runner.execute, [], []

    def other():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            raised.append(error)

    def run(plan):
        if not started:
            started.append(1)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", run)
    return raised


@pytest.mark.parametrize("name", ["generate", "stream", "add_request", "step"])
def test_a_second_thread_is_refused_and_the_first_finishes_right(llm, monkeypatch, name):
    calls = {
        "generate": lambda: llm.generate("b", PARAMS, use_tqdm=False),
        "stream": lambda: list(llm.stream("b", PARAMS)),
        "add_request": lambda: llm.engine.add_request("b"),
        "step": llm.engine.step,
    }
    expected = llm.generate("a", PARAMS, use_tqdm=False)[0].outputs[0]
    with monkeypatch.context() as patch:
        raised = inside_a_step(llm, patch, calls[name])
        found = llm.generate("a", PARAMS, use_tqdm=False)[0].outputs[0]
    assert [type(error) for error in raised] == [EngineError]
    assert "this LLM is used by another thread" in str(raised[0])
    assert found == expected


def test_one_thread_after_the_other_is_fine(llm):
    expected = llm.generate("a", PARAMS, use_tqdm=False)[0].outputs[0]
    found = []
    thread = threading.Thread(target=lambda: found.append(llm.generate("a", PARAMS, use_tqdm=False)[0].outputs[0]))
    thread.start()
    thread.join(20)
    assert found == [expected]


def test_an_abort_waits_for_the_other_thread(llm):
    llm.engine.add_request("a", PARAMS, "a")
    with llm.engine.exclusive.hold():
        thread = threading.Thread(target=lambda: llm.engine.abort("a"))
        thread.start()
        thread.join(0.05)
        assert llm.engine.has_unfinished_requests()
    thread.join(20)
    assert not llm.engine.has_unfinished_requests()
