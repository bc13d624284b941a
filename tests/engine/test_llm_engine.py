"""The engine step by step: what each step does and shows, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError


def poison(engine, value):
    """Fill every slot of the cache, as if it had never been written, with `value`."""
    storage = engine.runner.storage
    storage.keys[:, : storage.num_blocks] = storage.values[:, : storage.num_blocks] = value


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
    assert engine.kv.usage().utilization == 5 / 8
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
    assert len(metrics.inter_token_times) == 3
    assert all(seconds > 0 for seconds in metrics.inter_token_times)
    assert sum(metrics.inter_token_times) == pytest.approx(3 * metrics.time_per_output_token(4))


def test_metrics_before_anything_happened(make_llm):
    engine = make_llm(max_num_seqs=1).engine
    for name in "ab":
        engine.add_request("x", SamplingParams(max_tokens=3, ignore_eos=True), name)
    engine.step()
    waiting = engine.get_request("b").output().metrics
    assert (waiting.queue_time, waiting.time_to_first_token, waiting.e2e_latency) == (None, None, None)
    assert (waiting.inter_token_times, waiting.last_token_time) == ([], None)
    outputs = drain(engine)
    assert outputs["b"].metrics.queue_time >= sum(outputs["a"].metrics.inter_token_times)


def test_n_completions_are_independent_and_seeded(engine):
    params = SamplingParams(n=3, temperature=2.0, seed=5, max_tokens=12, ignore_eos=True)
    engine.add_request([1, 2], params, "three")
    engine.add_request([1, 2], SamplingParams(temperature=2.0, seed=5, max_tokens=12, ignore_eos=True), "one")
    outputs = drain(engine)
    three = [completion.token_ids for completion in outputs["three"].outputs]
    assert [completion.index for completion in outputs["three"].outputs] == [0, 1, 2]
    assert three[0] == outputs["one"].outputs[0].token_ids
    assert three[0] != three[1] != three[2] != three[0]


@pytest.mark.parametrize(("prompt", "length"), [([1] * 128, 128), ("x" * 500, 500)])
def test_a_prompt_without_room_for_an_answer(engine, prompt, length):
    with pytest.raises(PromptTooLongError, match=f"^the prompt has {length} tokens.*\\.$"):
        engine.add_request(prompt, SamplingParams())


def test_outputs_share_nothing_with_the_engine(engine):
    """Whatever a user does to what a step returned, the request goes on as it would have."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request([1, 2, 3], params, "alone")
    expected = drain(engine)["alone"].outputs[0].token_ids
    prompt = [1, 2, 3]
    engine.add_request(prompt, params, "a")
    first = engine.step()[0]
    seen = replace(first.metrics)
    for mine in (prompt, first.prompt_token_ids, first.outputs[0].token_ids):
        mine += [9, 9]
    params.stop_token_ids += expected
    params.temperature, params.repetition_penalty = 50.0, 9.0
    first.outputs.clear()
    second = engine.step()[0]
    assert first.metrics == seen != second.metrics
    first.metrics.arrival_time = -1.0
    second.metrics.token_times.clear()
    last = drain(engine)["a"]
    assert last.prompt_token_ids == [1, 2, 3]
    assert last.outputs[0].token_ids == expected
    assert last.metrics.arrival_time > 0
    assert len(last.metrics.token_times) == 4
    assert len(second.outputs[0].token_ids) == 2


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
    with pytest.raises(InvalidArgumentError, match="request_id=5"):
        engine.add_request([1], SamplingParams(), 5)
    drain(engine)


def test_generated_ids_avoid_those_in_use(engine):
    params = SamplingParams(max_tokens=1)
    taken = [engine.add_request([1], params, f"request-{number}") for number in (0, 2)]
    assert [engine.add_request([1], params) for _ in range(3)] == ["request-1", "request-3", "request-4"]
    assert set(taken) < set(drain(engine))


def test_a_refused_request_changes_no_later_one(make_llm):
    params = SamplingParams(temperature=2.0, max_tokens=9, ignore_eos=True)
    said = []
    for refused in (False, True):
        engine = make_llm().engine
        engine.add_request([1], params, "a")
        if refused:
            for prompt, name in (([1], "a"), ([], "b"), ([999], "c")):
                with pytest.raises(InvalidArgumentError):
                    engine.add_request(prompt, params, name)
        engine.add_request([1], params, "d")
        said.append({name: output.outputs[0].token_ids for name, output in drain(engine).items()})
    assert said[0] == said[1]


def test_longest_prompt_and_longest_output(engine):
    """A prompt may fill the context but for one token; max_tokens None or too large goes to the context's end."""
    engine.add_request([1] * 127, SamplingParams(max_tokens=None, ignore_eos=True), "full")
    engine.add_request([1] * 100, SamplingParams(max_tokens=10**6, ignore_eos=True), "long")
    outputs = drain(engine)
    assert len(outputs["full"].outputs[0].token_ids) == 1
    assert len(outputs["long"].outputs[0].token_ids) == 28
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"length"}


def test_what_unwritten_slots_hold_does_not_matter(make_llm):
    outputs = []
    for fill in (0.0, torch.nan):
        engine = make_llm().engine
        poison(engine, fill)
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), "a")
        outputs.append(drain(engine)["a"].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
