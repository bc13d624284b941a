"""Long work runs in a thread: prompts of many characters, and answers with many log-probabilities."""

import asyncio
import threading

import pytest

from vllm_teach.serving.http import openai_logprobs
from vllm_teach.serving.http.beside_the_loop import beside_the_loop

CHAT = {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(("size", "here"), [(0, True), (2048, True), (2049, False)])
def test_what_is_small_is_done_at_once(size, here):
    thread = asyncio.run(beside_the_loop(size, threading.current_thread))
    assert (thread is threading.current_thread()) == here


def test_what_the_work_raises_comes_out():
    for size in (0, 10_000):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(beside_the_loop(size, lambda: 1 // 0))


def test_long_works_wait_for_each_other_and_hold_up_no_shorter_one():
    go_on, working, most = threading.Event(), 0, 0

    def work() -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        assert go_on.wait(30)
        working -= 1

    async def try_it() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(beside_the_loop(1 << 20, work))
            while not working:
                await asyncio.sleep(0.001)
            assert await beside_the_loop(10_000, lambda: "done") == "done"
            go_on.set()

    for _ in range(2):  # in two event loops
        go_on.clear()
        asyncio.run(try_it())
    assert (working, most) == (0, 1)


@pytest.fixture
def threads(monkeypatch):
    """The threads in which log-probabilities are written."""
    found, write = set(), openai_logprobs._finite

    def watched(logprob):
        found.add(threading.current_thread())
        return write(logprob)

    monkeypatch.setattr(openai_logprobs, "_finite", watched)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tokens", "here"), [(3, True), (1000, False)])
def test_many_logprobs_of_a_chat_are_written_beside_the_loop(scripted, says, ranked, threads, stream, tokens, here):
    about = (ranked(("a", -0.5, 1), ("b", -1.0, 2)),) * tokens
    ask, _ = scripted([says("a" * tokens, finish="stop", logprobs=about)])
    answer = ask("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
    whole = answer.events()[1] if stream else answer.json()
    assert len(whole["choices"][0]["logprobs"]["content"]) == tokens
    assert (threads == {threading.current_thread()}) == here
    assert len(threads) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_so_are_those_of_a_long_prompt(scripted, says, ranked, threads, stream):
    about = (None, *[ranked(("A", -0.25, 1), ("b", -1.0, 2))] * 49)
    step = says("c", finish="stop", logprobs=(ranked(("c", -0.5, 1)),))
    ask, _ = scripted([{**step, "prompt_logprobs": about}])
    body = {"prompt": "A" * 50, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    assert ask("POST", "/v1/completions", body).status == 200
    assert threading.current_thread() not in threads
