"""Ctrl-C inside a step: nothing is lost, nothing is left, and all goes on as if there had been none."""

import os
import signal
import sys

import pytest

from vllm_teach import SamplingParams
from vllm_teach.engine.request import SampledToken

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def test_an_abort_after_an_interrupted_step_frees_first_too(engine, monkeypatch):
    """Then a sampled token still waits for its text."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    engine.add_request("x", LONG, "a")
    request = engine.get_request("a")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.tokenizer), "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert request.sequences[0].new_token is not None
        with pytest.raises(KeyboardInterrupt):
            engine.abort("a")
    assert request.finished
    assert engine.kv.pool.num_held == 0


def interrupted_once(engine, monkeypatch, place, call):
    """Raise KeyboardInterrupt in the `call`-th call of the place; after it, in place of doing anything (decode)."""
    calls = []
    if place == "after execute":
        execute = engine.runner.execute

        def run(plan):
            result = execute(plan)
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(engine.runner, "execute", run)
    else:
        decode = type(engine.tokenizer).decode

        def run(self, ids, skip_special_tokens=True):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return decode(self, ids, skip_special_tokens)

        monkeypatch.setattr(type(engine.tokenizer), "decode", run)
    return calls


@pytest.mark.parametrize("place", ["after execute", "decode"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 13, 20])
def test_after_an_interrupt_all_goes_on_as_if_there_had_been_none(make_llm, monkeypatch, assert_empty, place, call):
    """Seeded and greedy, with stop strings, log-probabilities and siblings: same tokens, same texts, same ends."""
    kinds = [
        SamplingParams(temperature=1.0, seed=2, max_tokens=12, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=9, n=2, stop=["e", "\x1b"]),
        SamplingParams(temperature=1.5, seed=4, max_tokens=12, stop=[chr(code) for code in range(32, 80)]),
    ]

    def run(interrupt):
        engine = make_llm().engine
        for index, params in enumerate(kinds):
            engine.add_request("aé", params, str(index))
        last, interrupts = {}, 0
        with monkeypatch.context() as patch:
            calls = interrupted_once(engine, patch, place, call) if interrupt else []
            while engine.has_unfinished_requests():
                try:
                    last |= {output.request_id: output for output in engine.step()}
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts == (interrupt and len(calls) >= call)
        assert_empty(engine)
        return {name: output.outputs for name, output in last.items()}

    assert run(interrupt=True) == run(interrupt=False)


PLACES = ["extend", "commit", "decode", "encode", "execute"]


def signalled_once(llm, monkeypatch, place, call):
    """Send this process a real SIGINT in the `call`-th call of the place, which then goes on."""
    owner = {"extend": llm.engine.kv, "commit": llm.engine.kv, "execute": llm.engine.runner}.get(place, llm.tokenizer)
    real, calls = getattr(owner, place), []

    def run(*args, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(owner, place, run)
    return calls


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_a_real_ctrl_c_harms_no_stream_beside_it(llm, monkeypatch, assert_empty, place, call):
    kinds = [SamplingParams(temperature=1.0, seed=3, max_tokens=25, ignore_eos=True), LONG.copy()]
    kinds[1].temperature = 0
    expected = ["".join(llm.stream("x", params)) for params in kinds]
    handler = signal.getsignal(signal.SIGINT)
    streams = [llm.stream("x", params) for params in kinds]
    said = [next(stream) for stream in streams]
    with monkeypatch.context() as patch:
        calls = signalled_once(llm, patch, place, call)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 8, SamplingParams(max_tokens=9, n=2, seed=1, logprobs=1), use_tqdm=False)
        assert len(calls) >= call
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(llm.engine._requests) == 2
    for text, stream, whole in zip(said, streams, expected, strict=True):
        assert text + "".join(stream) == whole
    assert_empty(llm.engine)


@pytest.mark.parametrize("place", PLACES)
def test_a_real_ctrl_c_in_a_stream_ends_it_and_nothing_is_held(llm, monkeypatch, place):
    signalled_once(llm, monkeypatch, place, 1)
    with pytest.raises(KeyboardInterrupt):
        "".join(llm.stream("x", LONG))  # `validate` encodes the text at once


def test_what_ended_in_an_interrupted_step_comes_from_the_next(llm, monkeypatch):
    llm.engine.add_request("x", SamplingParams(max_tokens=1), "a")
    signalled_once(llm, monkeypatch, "execute", 1)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert [output.request_id for output in llm.engine.step()] == ["a"]


def test_a_second_ctrl_c_is_not_put_off(engine, monkeypatch):
    def hang(plan):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the step went on")

    engine.add_request("x", SamplingParams(max_tokens=4), "a")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", hang)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert len(engine.step()[0].outputs[0].token_ids) == 1
    engine.abort("a")


@pytest.mark.parametrize("place", ["finish", "free", "decode"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_second_ctrl_c_within_an_abort_leaves_nothing(llm, monkeypatch, place, call):
    """Nobody would come back to what it left. `llm` is checked to be empty at its end."""
    engine = llm.engine
    engine.add_request("xé", SamplingParams(max_tokens=50, n=2, ignore_eos=True), "a")
    request = engine.get_request("a")
    engine.step()
    for sequence in request.sequences:  # as an interrupted step leaves them
        sequence.new_token = SampledToken(sequence.output_token_ids[-1])
    owner = {"finish": engine.scheduler, "free": engine.kv, "decode": llm.tokenizer}[place]
    real, calls = getattr(owner, place), []

    def twice(*args, **options):
        calls.append(1)
        if len(calls) == call:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, twice)
        with pytest.raises(KeyboardInterrupt):
            engine.abort("a")
    assert len(calls) > call  # it was done again
    assert [sequence.finish_reason for sequence in request.sequences] == ["abort"] * 2
    assert not any(sequence.new_token for sequence in request.sequences)


def test_handlers_of_the_programs_own_are_called_and_kept(engine):
    seen = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        own = signal.getsignal(signal.SIGINT)
        with engine.exclusive.hold(), engine.exclusive.hold():
            os.kill(os.getpid(), signal.SIGINT)
            assert not seen
            assert engine.exclusive.interrupted
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with engine.exclusive.hold():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_real_ctrl_c_at_any_line_of_the_engine_harms_nothing(make_llm, assert_empty):
    """At every 53rd line that `generate` runs in engine and cache, with a stream beside it."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    batch = SamplingParams(max_tokens=2, n=2, seed=1, ignore_eos=True)
    expected = "".join(make_llm().stream("x", params))

    def interrupted_at(line):
        """Return whether `generate` was interrupted there; False when it ended before."""
        llm, lines = make_llm(), 0

        def trace(frame, event, argument):
            nonlocal lines
            if not any(room in frame.f_code.co_filename for room in ("vllm_teach/engine/", "vllm_teach/kvcache/")):
                return None
            lines += event == "line"
            if event == "line" and lines == line:
                os.kill(os.getpid(), signal.SIGINT)
            return trace

        stream = llm.stream("x", params)
        said, before, interrupted = next(stream), sys.gettrace(), False
        try:
            sys.settrace(trace)
            llm.generate(["a", "b"], batch, use_tqdm=False)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        assert said + "".join(stream) == expected, line
        assert_empty(llm.engine)
        return interrupted

    lines = range(1, 100_000, 53)
    assert next(line for line in lines if not interrupted_at(line)) > 1000
