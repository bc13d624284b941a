"""How requests end otherwise than by themselves: abort and failure. Nothing of them may stay in the engine."""

import gc
import weakref

import pytest
import torch

from vllm_teach import SamplingParams, backends
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.request import SampledToken
from vllm_teach.errors import EngineError


def drain(engine):
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return last


def test_abort_waiting_running_and_unknown(make_llm, assert_empty):
    engine = make_llm(max_num_seqs=1, max_num_batched_tokens=64).engine
    for name in ("running", "waiting", "third"):
        engine.add_request([65, 66, 67], SamplingParams(max_tokens=6, ignore_eos=True, seed=1), name)
    requests = {name: engine.get_request(name) for name in ("running", "waiting")}
    engine.step()
    assert engine.kv.pool.num_held == 1
    engine.abort("running")
    assert engine.kv.pool.num_held == 0
    engine.abort("waiting")
    engine.abort("running")
    engine.abort("nobody")
    assert [request.sequences[0].finish_reason for request in requests.values()] == ["abort", "abort"]
    assert len(requests["running"].sequences[0].output_token_ids) == 1
    assert requests["running"].metrics.finished_time is not None
    assert list(drain(engine)) == ["third"]
    assert_empty(engine)


def test_abort_with_n(engine):
    engine.add_request([1, 2], SamplingParams(n=3, max_tokens=50, ignore_eos=True), "a")
    engine.step()
    engine.step()
    assert engine.kv.pool.num_held == 3  # each has a copy of the one block, since each wrote a token of its own
    engine.abort("a")


def test_abort_shows_the_text_that_was_held_back(engine):
    engine.add_request("x", SamplingParams(max_tokens=60, ignore_eos=True, seed=3), "a")
    sequence = engine.get_request("a").sequences[0]
    for _ in range(20):
        engine.step()
    engine.abort("a")
    assert sequence.text == bytes(t for t in sequence.output_token_ids if t < 256).decode(errors="replace")


def test_forward_failure_ends_the_scheduled_and_the_engine_stays_usable(engine, monkeypatch, assert_empty):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add_request([1, 2, 3], params, "before")
    expected = drain(engine)["before"].outputs[0].token_ids
    for name in ("a", "b"):
        engine.add_request([1, 2, 3], params, name)
    engine.step()

    def broken(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", broken)
        outputs = engine.step()
    assert [output.request_id for output in outputs] == ["a", "b"]
    for output in outputs:
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].token_ids) == 1  # what there was
        assert isinstance(output.error, EngineError)
        assert "out of memory" in str(output.error)
    assert_empty(engine)
    engine.add_request([1, 2, 3], params, "a")  # the id is free again
    assert drain(engine)["a"].outputs[0].token_ids == expected


def test_a_failing_attention_backend_is_a_forward_failure(engine, monkeypatch):
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), "a")

    def broken(*args, **options):
        raise ValueError("bad tile")

    monkeypatch.setattr(backends.get("sdpa"), "run", broken)
    output = drain(engine)["a"]
    assert isinstance(output.error.__cause__, ValueError)


def test_one_row_of_nan_fails_one_request(engine, monkeypatch):
    """The model breaks for prompts that hold token 99; the neighbours' tokens stay what they are alone."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=8, ignore_eos=True)
    for name in ("x", "y"):
        engine.add_request([5, ord(name)], params, name)
    expected = {name: output.outputs[0].token_ids for name, output in drain(engine).items()}
    logits = engine.model.logits

    def sometimes_nan(hidden):
        result = logits(hidden).clone()
        for row, item in enumerate(engine_plan):
            if 99 in item.sequence.prompt_token_ids and item.sequence.output_token_ids:
                result[row] = torch.nan
        return result

    engine_plan = []
    execute = engine.runner.execute
    monkeypatch.setattr(
        engine.runner, "execute", lambda plan: (engine_plan.__setitem__(slice(None), plan.items), execute(plan))[1]
    )
    monkeypatch.setattr(engine.model, "logits", sometimes_nan)
    for prompt, name in (([5, ord("x")], "x"), ([99], "bad"), ([5, ord("y")], "y")):
        engine.add_request(prompt, params, name)
    outputs = drain(engine)
    assert isinstance(outputs["bad"].error, EngineError)
    assert len(outputs["bad"].outputs[0].token_ids) == 1
    for name in ("x", "y"):
        assert outputs[name].error is None
        assert outputs[name].outputs[0].token_ids == expected[name]


def test_one_failing_text_fails_one_request_and_its_siblings(engine, monkeypatch):
    decode = type(engine.tokenizer).decode

    def broken(self, ids, skip_special_tokens=True):
        if 99 in ids:
            raise KeyError("no such token")
        return decode(self, ids, skip_special_tokens)

    engine.add_request([1], SamplingParams(max_tokens=3, ignore_eos=True), "good")
    engine.add_request([5], SamplingParams(n=2, max_tokens=3, ignore_eos=True, logprobs=-1), "bad")
    monkeypatch.setattr(type(engine.tokenizer), "decode", broken)
    outputs = drain(engine)
    assert outputs["good"].error is None
    assert len(outputs["good"].outputs[0].token_ids) == 3
    assert isinstance(outputs["bad"].error, EngineError)
    assert {each.finish_reason for each in outputs["bad"].outputs} <= {"error", "abort"}


CAT = "ab🐈".encode()


def sampled(plan):
    """The sequences that get a token."""
    return [each for item in plan.items for each in (item.sequence, *item.sequence.forks)]


def says(engine, monkeypatch, data, then=None):
    """Let the model say the bytes of `data` to every sequence; after the last one it raises `then`."""
    left = list(data)

    def execute(plan):
        if not left:
            raise then
        token = SampledToken(left.pop(0))
        return StepResult({sequence.seq_id: token for sequence in sampled(plan)})

    monkeypatch.setattr(engine.runner, "execute", execute)


LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_text_and_tokens_agree_however_a_request_ends(engine, monkeypatch, end):
    """The model said three quarters of a character: it shows as what it is."""
    says(engine, monkeypatch, CAT[:-1], RuntimeError("boom"))
    engine.add_request([1], LONG, "a")
    request = engine.get_request("a")
    for _ in CAT[:-1]:
        engine.step()
    assert request.sequences[0].text == "ab"
    engine.abort("a") if end == "abort" else engine.step()
    completion = request.output().outputs[0]
    assert (completion.token_ids, completion.text) == (list(CAT[:-1]), "ab\ufffd")


def test_a_sibling_ended_by_an_error_shows_all_its_text(engine, monkeypatch):
    left = list(CAT[:-1])

    def execute(plan):
        ids = [sequence.seq_id for sequence in sampled(plan)]
        if len(left) == 1:
            return StepResult({ids[1]: SampledToken(left.pop())}, {ids[0]: EngineError("broken.")})
        token = SampledToken(left.pop(0))
        return StepResult(dict.fromkeys(ids, token))

    monkeypatch.setattr(engine.runner, "execute", execute)
    engine.add_request([1], SamplingParams(n=2, max_tokens=50, ignore_eos=True), "a")
    first, second = drain(engine)["a"].outputs
    assert (first.finish_reason, first.token_ids, first.text) == ("error", list(CAT[:-2]), "ab\ufffd")
    assert (second.finish_reason, second.token_ids, second.text) == ("abort", list(CAT[:-1]), "ab\ufffd")


def test_an_abort_frees_before_it_asks_the_tokenizer(engine, monkeypatch):
    for name in "abc":
        engine.add_request("x", LONG, name)
    requests = {name: engine.get_request(name) for name in "abc"}
    engine.step()
    assert engine.kv.pool.num_held == 3
    for count, (name, error) in enumerate((("a", KeyError("x")), ("b", KeyboardInterrupt())), start=1):

        def broken(*args, error=error, **options):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(type(engine.tokenizer), "decode", broken)
            if isinstance(error, Exception):
                engine.abort(name)
                assert isinstance(requests[name].error, EngineError)
            else:
                with pytest.raises(KeyboardInterrupt):
                    engine.abort(name)
        assert engine.kv.pool.num_held == 3 - count
        assert requests[name].finished
        with pytest.raises(KeyError):
            engine.get_request(name)
    engine.abort("c")


def test_abort_by_request_never_hits_a_later_one_of_the_same_name(engine):
    engine.add_request([1], SamplingParams(max_tokens=1), "a")
    ended = engine.get_request("a")
    drain(engine)
    engine.add_request([1], LONG, "a")
    engine.abort(ended)
    assert not engine.get_request("a").finished
    engine.abort(engine.get_request("a"))


def test_a_failure_keeps_no_tensor_alive(engine, monkeypatch):
    """The error stays in the output, and a traceback would keep the frames of the forward pass and all they hold."""
    hidden_states = []

    def broken(hidden):
        hidden_states.append(weakref.ref(hidden))
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("out of memory") from error

    monkeypatch.setattr(engine.model, "logits", broken)
    engine.add_request([1, 2, 3], LONG, "a")
    output = engine.step()[0]
    gc.collect()
    assert hidden_states[0]() is None
    assert isinstance(output.error.__cause__, RuntimeError)
    assert "in broken" in output.error.__notes__[0]  # where it happened can still be read


def test_a_failure_in_sampling_keeps_no_logits_alive(engine, monkeypatch):
    kept = []

    def broken(logits, *rest):
        kept.append(weakref.ref(logits))
        raise RuntimeError("boom")

    monkeypatch.setattr("vllm_teach.engine.sampler.change.penalize", broken)
    engine.add_request([1, 2, 3], SamplingParams(presence_penalty=1.0), "a")
    output = engine.step()[0]
    gc.collect()
    assert "boom" in str(output.error)
    assert kept
    assert all(ref() is None for ref in kept)
