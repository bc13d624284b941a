import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError


@pytest.fixture
def engine(make_llm):
    engine = make_llm().engine
    yield engine
    assert_empty(engine)


def assert_empty(engine):
    """Nothing of any request is left, however it ended."""
    assert engine.kv.slots_held == engine.kv.tokens_stored == 0
    assert engine.kv.longest_free_run == engine.kv.num_slots
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running
    assert not engine.has_unfinished_requests()
    assert not engine._requests
    assert not engine._request_of
    assert not engine._texts


def drain(engine):
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return last


def test_step_by_step(engine):
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), "a")
    first = engine.step()
    assert (engine.last_step.num_prefill_tokens, engine.last_step.num_decode_tokens) == (5, 0)
    assert engine.last_step.seconds > 0
    assert [output.request_id for output in first] == ["a"]
    assert len(first[0].outputs[0].token_ids) == 1
    assert not first[0].finished
    assert engine.kv.utilization == 5 / 8
    engine.add_request([9] * 7, SamplingParams(temperature=0, max_tokens=1), "b")
    both = engine.step()
    assert (engine.last_step.num_prefill_tokens, engine.last_step.num_decode_tokens) == (7, 1)
    assert engine.last_plan.items[0].start == 5
    assert [(output.request_id, output.finished) for output in both] == [("a", False), ("b", True)]
    assert len(first[0].outputs[0].token_ids) == 1  # a snapshot: later steps do not change it
    last = engine.step()[0]
    assert last.finished
    assert last.outputs[0].finish_reason == "length"
    assert engine.step() == []


def test_metrics_are_in_order(engine):
    engine.add_request("hello", SamplingParams(max_tokens=4, ignore_eos=True), "a")
    output = drain(engine)["a"]
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time < metrics.first_token_time < metrics.last_token_time
    assert metrics.last_token_time <= metrics.finished_time
    assert 0 <= metrics.queue_time < metrics.time_to_first_token < metrics.e2e_latency
    assert metrics.time_per_output_token(4) > 0
    assert metrics.time_per_output_token(1) is None


def test_n_completions_are_independent_and_seeded(engine):
    params = SamplingParams(n=3, temperature=2.0, seed=5, max_tokens=12, ignore_eos=True)
    engine.add_request([1, 2], params, "three")
    engine.add_request([1, 2], SamplingParams(temperature=2.0, seed=5, max_tokens=12, ignore_eos=True), "one")
    outputs = drain(engine)
    three = [completion.token_ids for completion in outputs["three"].outputs]
    assert [completion.index for completion in outputs["three"].outputs] == [0, 1, 2]
    assert three[0] == outputs["one"].outputs[0].token_ids
    assert three[0] != three[1] != three[2] != three[0]


def test_abort_waiting_running_and_unknown(make_llm):
    engine = make_llm(max_num_seqs=1, max_num_batched_tokens=64).engine
    for name in ("running", "waiting", "third"):
        engine.add_request([65, 66, 67], SamplingParams(max_tokens=6, ignore_eos=True, seed=1), name)
    requests = {name: engine.get_request(name) for name in ("running", "waiting")}
    engine.step()
    assert engine.kv.slots_held == 9
    engine.abort("running")
    assert engine.kv.slots_held == 0
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
    assert engine.kv.slots_held == 3 * 52
    engine.abort("a")


def test_abort_shows_the_text_that_was_held_back(engine):
    engine.add_request("x", SamplingParams(max_tokens=60, ignore_eos=True, seed=3), "a")
    sequence = engine.get_request("a").sequences[0]
    for _ in range(20):
        engine.step()
    engine.abort("a")
    assert sequence.text == bytes(t for t in sequence.output_token_ids if t < 256).decode(errors="replace")


def test_forward_failure_ends_the_scheduled_and_the_engine_stays_usable(engine, monkeypatch):
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
    monkeypatch.setattr(engine.runner, "_attend_one", lambda *args: (_ for _ in ()).throw(ValueError("bad tile")))
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


@pytest.mark.parametrize(
    ("prompt", "error", "named"),
    [
        ("", InvalidArgumentError, "empty"),
        ([], InvalidArgumentError, "empty"),
        ([1, -1], InvalidArgumentError, "-1"),
        ([259], InvalidArgumentError, "259"),
        ([1, "a"], InvalidArgumentError, "'a'"),
        ([True], InvalidArgumentError, "True"),
        ([1.0], InvalidArgumentError, "1.0"),
        (None, InvalidArgumentError, "NoneType"),
        (7, InvalidArgumentError, "int"),
        ("bad \ud800 half", InvalidArgumentError, "no valid text"),
        ([1] * 128, PromptTooLongError, "128 tokens"),
        ("x" * 500, PromptTooLongError, "500 tokens"),
    ],
)
def test_bad_prompts(engine, prompt, error, named):
    with pytest.raises(error, match=named) as caught:
        engine.add_request(prompt, SamplingParams())
    assert str(caught.value).endswith(".")


def test_bad_parameters(engine):
    with pytest.raises(InvalidArgumentError, match="stop_token_ids"):
        engine.add_request([1], SamplingParams(stop_token_ids=[259]))
    with pytest.raises(InvalidArgumentError, match="sampling_params"):
        engine.add_request([1], {"temperature": 0})
    changed = SamplingParams()
    changed.top_p = 0
    with pytest.raises(InvalidArgumentError, match="top_p"):
        engine.add_request([1], changed)


def test_a_request_id_in_use_is_refused(engine):
    engine.add_request([1], SamplingParams(max_tokens=1), "a")
    with pytest.raises(InvalidArgumentError, match="'a' is in use"):
        engine.add_request([1], SamplingParams(), "a")
    drain(engine)


def test_longest_prompt_and_longest_output(engine):
    """A prompt may fill the context but for one token; max_tokens None or too large goes to the context's end."""
    engine.add_request([1] * 127, SamplingParams(max_tokens=None, ignore_eos=True), "full")
    engine.add_request([1] * 100, SamplingParams(max_tokens=10**6, ignore_eos=True), "long")
    outputs = drain(engine)
    assert len(outputs["full"].outputs[0].token_ids) == 1
    assert len(outputs["long"].outputs[0].token_ids) == 28
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"length"}


def test_context_follows_the_cache_or_is_refused(tiny_model, byte_tokenizer):
    size = tiny_model.config.kv_bytes_per_token(4)
    assert LLMEngine(tiny_model, byte_tokenizer, EngineConfig(50 * size)).max_model_len == 50
    assert LLMEngine(tiny_model, byte_tokenizer, EngineConfig(500 * size)).max_model_len == 128
    with pytest.raises(InvalidArgumentError, match="max_model_len=60 does not fit"):
        LLMEngine(tiny_model, byte_tokenizer, EngineConfig(50 * size, max_model_len=60))
    for bad in (0, 1, 129, True, 64.0):
        with pytest.raises(InvalidArgumentError, match=f"max_model_len={bad}"):
            LLMEngine(tiny_model, byte_tokenizer, EngineConfig(500 * size, max_model_len=bad))


def test_what_unwritten_slots_hold_does_not_matter(make_llm):
    outputs = []
    for fill in (0.0, torch.nan):
        engine = make_llm().engine
        engine.runner.storage.keys.fill_(fill)
        engine.runner.storage.values.fill_(fill)
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), "a")
        outputs.append(drain(engine)["a"].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
