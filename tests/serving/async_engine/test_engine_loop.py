"""The loop around the engine's steps, run in this thread: what it is told is decided by what it says."""

from queue import SimpleQueue

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineDeadError, EngineError, InvalidArgumentError, PromptTooLongError
from vllm_teach.serving.async_engine.deltas import Answer
from vllm_teach.serving.async_engine.engine_loop import EngineLoop
from vllm_teach.serving.async_engine.messages import (
    AbortRequest,
    AddRequest,
    ResetPrefixCache,
    StopEngine,
)
from vllm_teach.serving.metrics.step_reporter import StepReporter
from vllm_teach.serving.metrics.token_latencies import TokenLatencies

LONG = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)


def tokens(*token_ids):
    return {"prompt_token_ids": list(token_ids), "prompt": None, "cache_salt": None}


def add(request_id, token_ids=(5, 6, 7), params=LONG, **more):
    return AddRequest(request_id, tokens(*token_ids), params, **more)


class Session:
    """Runs a loop: `script` maps an update's number to messages that arrive just then; idle, it is stopped."""

    def __init__(self, llm, first, script=None, reporter=None):
        self.llm, self.script, self.updates = llm, script or {}, []
        self.inbox = SimpleQueue()
        self.loop = EngineLoop(llm.engine, self.inbox, self.take, reporter)
        for message in first:
            self.inbox.put(message)

    def take(self, update):
        self.updates.append(update)
        for message in self.script.get(len(self.updates), ()):
            self.inbox.put(message)
        if not self.llm.engine.has_unfinished_requests() and self.inbox.empty():
            self.inbox.put(StopEngine())

    def run(self):
        self.loop.run()
        return self

    @property
    def deltas(self):
        return [delta for update in self.updates for delta in update.deltas]

    def last(self):
        """Return the last delta of each request, and fail if one has several."""
        ended = [delta for delta in self.deltas if delta.finished]
        assert len({delta.request_id for delta in ended}) == len(ended)
        return {delta.request_id: delta for delta in ended}


def joined(session, message):
    answer = Answer(message.request_id, message.prompt, message.params.n, logprobs=message.params.logprobs is not None)
    for delta in session.deltas:
        if delta.request_id == message.request_id:
            answer.add(delta)
    return answer.output


CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12),
    "several": SamplingParams(n=3, seed=7, max_tokens=9),
    "logprobs": SamplingParams(seed=3, logprobs=2, prompt_logprobs=1, max_tokens=7),
    "stop": SamplingParams(seed=2, stop=["e"], max_tokens=30),
    "ids only": SamplingParams(seed=4, detokenize=False, max_tokens=5),
    "one token": SamplingParams(seed=5, max_tokens=1),
}


def test_answers_are_those_of_the_offline_engine(tiny_llm, make_tiny_llm):
    prompts = [[5 + index, 6, 7, 300 + index] for index in range(len(CASES))]
    expected = make_tiny_llm().generate(prompts, list(CASES.values()), use_tqdm=False)
    messages = [add(name, ids, params) for (name, params), ids in zip(CASES.items(), prompts, strict=True)]
    session = Session(tiny_llm, messages).run()
    assert session.last().keys() == CASES.keys()
    for message, wanted in zip(messages, expected, strict=True):
        found = joined(session, message)
        assert found.outputs == wanted.outputs
        assert found.prompt_logprobs == wanted.prompt_logprobs
        assert found.finished


def test_answers_do_not_depend_on_when_requests_come(tiny_llm, make_tiny_llm):
    prompts = [[5 + index, 6, 7] for index in range(6)]
    params = [SamplingParams(seed=index, max_tokens=8) for index in range(6)]
    expected = make_tiny_llm().generate(prompts, params, use_tqdm=False)
    messages = [add(str(index), prompts[index], params[index]) for index in range(6)]
    session = Session(tiny_llm, messages[:1], {index: [messages[index]] for index in range(1, 6)}).run()
    for message, wanted in zip(messages, expected, strict=True):
        assert joined(session, message).outputs == wanted.outputs


def test_a_long_prompt_says_that_it_began_before_it_has_tokens(make_tiny_llm):
    llm = make_tiny_llm(max_num_batched_tokens=8, max_num_seqs=8)
    session = Session(llm, [add("long", range(5, 35), SamplingParams(max_tokens=2))]).run()
    assert [len(delta.completions) for delta in session.deltas] == [0, 1, 1]
    assert len(session.updates) == 6  # 30 tokens of prompt take 4 steps; each step says something, and so does the end


def test_an_abort_frees_the_blocks_before_the_next_step(tiny_llm, monkeypatch):
    step, held = tiny_llm.engine.step, []

    def watched_step():
        held.append({name: sum(map(tiny_llm.engine.kv.has, ids)) for name, ids in ids_of.items()})
        return step()

    session = Session(tiny_llm, [add("a"), add("b", (9, 10))], {3: [AbortRequest("a")]})
    monkeypatch.setattr(tiny_llm.engine, "step", watched_step)
    ids_of = {"a": [0], "b": [1]}
    last = session.run().last()
    assert [(each["a"], each["b"]) for each in held[:5]] == [(0, 0), (1, 1), (1, 1), (0, 1), (0, 1)]
    assert last["a"].completions[0].finish_reason == "abort"
    assert last["b"].completions[0].finish_reason == "length"
    assert last["b"].num_generation_tokens == 40


def test_an_abort_that_comes_with_its_request_or_too_late_is_answered_once(tiny_llm):
    short = SamplingParams(max_tokens=1)
    first = [add("a"), AbortRequest("a"), AbortRequest("a"), AbortRequest("unknown"), add("b", params=short)]
    last = Session(tiny_llm, first, {1: [AbortRequest("b"), AbortRequest("a")]}).run().last()
    assert {name: delta.completions[0].finish_reason for name, delta in last.items()} == {"a": "abort", "b": "length"}


def test_refused_requests_get_their_error_at_once_and_harm_nobody(tiny_llm):
    long = range(5, 5 + tiny_llm.engine.max_model_len)
    last = Session(tiny_llm, [add("good"), add("long", long), add("good 2"), add("wrong", (10**6,))]).run().last()
    assert {name: type(delta.error) for name, delta in last.items()} == {
        "good": type(None),
        "long": PromptTooLongError,
        "good 2": type(None),
        "wrong": InvalidArgumentError,
    }
    assert last["long"].num_prompt_tokens == len(long)


def test_an_error_nobody_thought_of_in_adding_is_that_requests_own(tiny_llm, monkeypatch):
    def broken(prompt_token_ids, params):
        raise ZeroDivisionError("by chance")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_llm.engine.writer, "new_text", broken)
        last = Session(tiny_llm, [add("a")]).run().last()
    assert type(last["a"].error) is EngineError
    assert "by chance" in str(last["a"].error)


def test_a_failing_forward_pass_ends_its_requests_and_not_the_loop(tiny_llm, monkeypatch):
    execute, calls = tiny_llm.engine.runner.execute, []

    def fail_once(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("a kernel failed")
        return execute(plan)

    monkeypatch.setattr(tiny_llm.engine.runner, "execute", fail_once)
    last = Session(tiny_llm, [add("a"), add("b")], {3: [add("c")]}).run().last()
    assert [type(last[name].error) for name in "abc"] == [EngineError, EngineError, type(None)]


def test_what_breaks_the_loop_comes_out_and_leaves_nothing_held(tiny_llm, monkeypatch):
    schedule, calls = tiny_llm.engine.scheduler.schedule, []

    def fail_later():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the bookkeeping is broken")
        return schedule()

    monkeypatch.setattr(tiny_llm.engine.scheduler, "schedule", fail_later)
    with pytest.raises(RuntimeError, match="bookkeeping is broken"):
        Session(tiny_llm, [add("a"), add("b")]).run()


def test_a_dead_worker_is_the_engines_failure_not_a_requests(tiny_llm, monkeypatch):
    def dead(plan):
        raise EngineDeadError("rank 1 has died: load the model again.")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_llm.engine.runner, "execute", dead)
        with pytest.raises(EngineDeadError, match="rank 1"):
            Session(tiny_llm, [add("a")]).run()


def test_stop_aborts_and_says_so(tiny_llm):
    session = Session(tiny_llm, [add("a"), add("b")], {2: [AbortRequest("b"), StopEngine(), add("late")]}).run()
    last = session.last()
    assert {name: delta.completions[0].finish_reason for name, delta in last.items()} == dict.fromkeys(
        ("a", "b", "late"), "abort"
    )
    assert len(session.updates) == 3


def test_requests_of_others_in_the_same_engine_are_not_its_business(tiny_llm):
    tiny_llm.engine.add_request([5, 6], LONG, "foreign")
    session = Session(tiny_llm, [add("a", params=SamplingParams(max_tokens=2))])
    session.script = {2: [StopEngine()]}
    session.run()
    assert set(session.last()) == {"a"}
    assert tiny_llm.engine.get_request("foreign").sequences[0].output_token_ids  # it went on beside it
    tiny_llm.engine.abort("foreign")


def test_messages_without_end_do_not_hold_up_the_step(tiny_llm, monkeypatch):
    session = Session(tiny_llm, [add("a", params=SamplingParams(max_tokens=3))])
    reset, resets = tiny_llm.engine.reset_prefix_cache, []

    def reset_and_ask_again():
        reset()
        resets.append(1)
        if not session.last():
            session.inbox.put(ResetPrefixCache())

    monkeypatch.setattr(tiny_llm.engine, "reset_prefix_cache", reset_and_ask_again)
    session.inbox.put(ResetPrefixCache())
    session.run()
    assert len(resets) == 4


def test_the_prefix_cache_is_forgotten_when_asked(tiny_llm):
    prompt, params = range(5, 25), SamplingParams(max_tokens=1)
    script = {1: [add("warm", prompt, params)], 2: [ResetPrefixCache(), add("cold", prompt, params)]}
    last = Session(tiny_llm, [add("first", prompt, params)], script).run().last()
    assert [last[name].num_cached_tokens for name in ("first", "warm", "cold")] == [0, 16, 0]


def test_figures_come_when_it_goes_idle_and_not_with_each_step(tiny_llm, monkeypatch):
    reports = []
    now = [0.0]
    monkeypatch.setattr("vllm_teach.serving.async_engine.engine_loop.time.monotonic", lambda: now[0])

    class Reporter:
        latencies = TokenLatencies()

        def report(self):
            reports.append(len(session.updates))
            return f"report {len(reports)}"

    first = [add("a", params=SamplingParams(max_tokens=20, ignore_eos=True))]
    session = Session(tiny_llm, first, reporter=Reporter())
    take = session.take

    def later(update):
        now[0] += 0.03
        take(update)

    session.loop.send = later
    session.run()
    assert [index for index, update in enumerate(session.updates) if update.report is not None] == reports
    assert reports == [0, 4, 8, 12, 16, 19, 20]  # every 0.12 s; when it has ended; when it was told to stop


@pytest.mark.parametrize("whole", [False, True])
def test_each_token_is_timed_as_it_comes_whoever_reads_it(tiny_llm, whole):
    reporter, seen = StepReporter(tiny_llm.engine), []
    params = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True)
    session = Session(tiny_llm, [add("a", params=params, whole=whole), add("b", whole=whole)], reporter=reporter)
    session.script = {8: [AbortRequest("b")]}
    take = session.take

    def look(update):
        seen.append(tuple(sum(each.read().counts) for each in (reporter.latencies.first, reporter.latencies.between)))
        take(update)

    session.loop.send = look
    session.run()
    # Five tokens of a, whose completions get theirs together, and eight of b. A token more of b is not waited for.
    assert seen[:9] == [(2, 0), (2, 2), (2, 4), (2, 6), (2, 8), (2, 9), (2, 10), (2, 11), (2, 11)]


def test_a_request_is_as_old_as_the_server_says(tiny_llm):
    last = Session(tiny_llm, [add("old", arrival_time=1.0), add("young", arrival_time=1e18), add("now")]).run().last()
    assert last["old"].metrics.arrival_time == 1.0
    assert last["young"].metrics.queue_time >= 0  # a clock that runs ahead makes no negative times
    assert last["now"].metrics.queue_time >= 0


def test_other_threads_may_use_the_engine_only_while_it_is_idle(tiny_llm):
    import threading

    found = []

    def use():
        try:
            found.append(tiny_llm.generate([5, 6], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished)
        except EngineError as error:
            found.append(str(error))

    class Other(Session):
        def take(self, update):
            thread = threading.Thread(target=use)
            thread.start()
            thread.join(20)
            super().take(update)

    Other(tiny_llm, [add("a", params=SamplingParams(max_tokens=2))]).run()
    assert len(found) == 3
    assert all("used by another thread" in each for each in found)
    use()
    assert found[-1] is True
