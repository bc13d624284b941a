import random

import pytest
import torch

from vllm_teach import LLM, SamplingParams
from vllm_teach.engine.uncached import generate_without_cache
from vllm_teach.errors import EngineError, InvalidArgumentError, ModelNotFoundError, PromptTooLongError
from vllm_teach.models.attend import full_causal

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def llm(make_llm):
    llm = make_llm()
    yield llm
    assert llm.engine.kv.slots_held == 0
    assert not llm.engine.has_unfinished_requests()


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_cache_gives_what_recomputing_gives(llm, tiny_model):
    seen = []
    prompt = [7, 8, 9]
    expected = generate_without_cache(tiny_model, prompt, 10, lambda count, seconds: seen.append(count))
    assert tokens(llm.generate([prompt], GREEDY, use_tqdm=False)) == [expected]
    assert seen == list(range(3, 13))
    assert len(set(expected)) > 3
    with pytest.raises(InvalidArgumentError, match="empty"):
        generate_without_cache(tiny_model, [], 1)


def test_forms_of_prompts_and_their_order(llm):
    assert llm.generate([]) == []
    one = llm.generate("abc", GREEDY, use_tqdm=False)
    assert (one[0].prompt, one[0].prompt_token_ids) == ("abc", [97, 98, 99])
    assert tokens(llm.generate([97, 98, 99], GREEDY, use_tqdm=False)) == tokens(one)
    mixed = llm.generate(["abc", [1, 2], "z"], [GREEDY, SamplingParams(max_tokens=2), GREEDY], use_tqdm=False)
    assert [output.prompt for output in mixed] == ["abc", None, "z"]
    assert tokens(mixed)[0] == tokens(one)[0]
    assert len(tokens(mixed)[1]) <= 2


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"max_num_seqs": 64},
        {"slots": 110, "max_model_len": 60},
        {"attention_backend": "naive"},
        {"attention_backend": "tiled"},
    ],
)
def test_batching_and_limits_change_no_token(make_llm, limits):
    """Greedy, seeded and penalised requests, each alone and all together under various limits, in float32."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"temperature": 1.5, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3},
    ]
    params = [SamplingParams(max_tokens=rng.randint(1, 19), **kinds[i % 4]) for i in range(12)]
    single = make_llm(max_model_len=60)
    expected = [tokens(single.generate([p], each, use_tqdm=False))[0] for p, each in zip(prompts, params, strict=True)]
    llm = make_llm(**{"max_model_len": 60, **limits})
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.engine.kv.slots_held == 0
    assert len({tuple(each) for each in expected}) == 12


def test_engine_seed_drives_unseeded_requests(make_llm):
    params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)

    def run(seed):
        llm = make_llm(seed=seed)
        return [tokens(llm.generate(["a", "a"], params, use_tqdm=False)) for _ in range(2)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert first[0][0] != first[0][1]  # two requests draw different numbers
    assert first[0] != first[1]


def test_text_is_its_tokens(llm):
    params = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, n=4, seed=0)
    for completion in llm.generate("é", params, use_tqdm=False)[0].outputs:
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
    shown = SamplingParams(temperature=1.5, max_tokens=40, seed=0, detokenize=False)
    assert llm.generate("é", shown, use_tqdm=False)[0].outputs[0].text == ""


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(llm, include):
    base = {"temperature": 1.0, "seed": 2, "max_tokens": 60, "ignore_eos": True}
    text = llm.generate("x", SamplingParams(**base), use_tqdm=False)[0].outputs[0].text
    stop = text[10:13]  # three characters: three tokens or more
    params = SamplingParams(**base, stop=["never", stop], include_stop_str_in_output=include)
    completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    position = text.find(stop)
    assert completion.text == text[: position + (len(stop) if include else 0)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 60
    assert "".join(llm.stream("x", params)) == completion.text


def test_stop_string_on_the_last_allowed_token(llm):
    """Both limits are met at once: the text's end counts, as in vLLM."""
    base = {"temperature": 1.0, "seed": 2, "ignore_eos": True}
    ids = llm.generate("q", SamplingParams(**base, max_tokens=30), use_tqdm=False)[0].outputs[0].token_ids
    count, stop = next((i + 1, chr(t)) for i, t in enumerate(ids) if 32 < t < 127 and t not in ids[:i])
    completion = llm.generate("q", SamplingParams(**base, max_tokens=count, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == ids[:count]
    assert completion.text == llm.tokenizer.decode(ids[: count - 1])


def test_eos_and_stop_tokens(llm):
    # A flat distribution draws end-of-sequence soon.
    flat = {"temperature": 100.0, "max_tokens": 120}
    params = [SamplingParams(**flat, seed=seed) for seed in range(8)]
    ended = [output.outputs[0] for output in llm.generate(["a"] * 8, params, use_tqdm=False)]
    stopped = [completion for completion in ended if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == 256
        assert 256 not in completion.token_ids[:-1]
        assert completion.stop_reason is None
    ids = ended[0].token_ids
    named = SamplingParams(**flat, seed=0, stop_token_ids=[ids[4]])
    completion = llm.generate("a", named, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == ids[: ids.index(ids[4]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[4])
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


def test_min_tokens(llm):
    params = SamplingParams(
        temperature=100.0, max_tokens=60, min_tokens=60, seed=1, stop_token_ids=list(range(0, 256, 2))
    )
    completion = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
    assert len(completion.token_ids) == 60
    assert all(token % 2 for token in completion.token_ids)
    assert completion.finish_reason == "length"


def test_logprobs(llm, tiny_model):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    output = llm.generate([3, 4], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    ids = torch.tensor(output.prompt_token_ids + completion.token_ids)
    raw = tiny_model.logits(tiny_model(ids, torch.arange(len(ids)), full_causal())).log_softmax(-1)
    total = 0.0
    assert len(completion.logprobs) == 6
    for step, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert token in entries
        assert 2 <= len(entries) <= 3
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(raw[1 + step, token_id].item(), abs=1e-4)
            assert entry.decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
        total += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    plain = llm.generate([3, 4], GREEDY, use_tqdm=False)[0].outputs[0]
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None


def test_stream_joins_to_the_text(llm):
    for seed in range(6):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=50)
        pieces = list(llm.stream("🐈", params))
        assert "".join(pieces) == llm.generate("🐈", params, use_tqdm=False)[0].outputs[0].text
        assert all(pieces)
        assert len(pieces) > 3


def test_stream_checks_at_once_and_cleans_up(llm):
    with pytest.raises(PromptTooLongError):
        llm.stream("x" * 200)
    with pytest.raises(InvalidArgumentError, match="n=2"):
        llm.stream("x", SamplingParams(n=2))
    llm.stream("never started")
    pieces = llm.stream("x", SamplingParams(max_tokens=100, ignore_eos=True, seed=0))
    next(pieces)
    assert llm.engine.kv.slots_held > 0
    pieces.close()
    assert llm.engine.kv.slots_held == 0


def test_generate_while_a_stream_is_open(llm):
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=30, ignore_eos=True)
    expected = llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
    pieces = llm.stream("x", params)
    begun = next(pieces)
    llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=60, ignore_eos=True)], use_tqdm=False)
    assert begun + "".join(pieces) == expected


def test_chat(llm):
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == [257, 104, 105, 258]
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2
    for bad in ([], [[]], ["hi"], "hi"):
        with pytest.raises(InvalidArgumentError, match="messages"):
            llm.chat(bad)


BAD = [
    ("", InvalidArgumentError),
    ([], InvalidArgumentError),
    ([999], InvalidArgumentError),
    ("x" * 999, PromptTooLongError),
]


@pytest.mark.parametrize(("bad", "error"), BAD)
def test_a_bad_prompt_raises_with_its_index_and_nothing_runs(llm, monkeypatch, bad, error):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step ran"))
    with pytest.raises(error, match=r"^prompts\[1\]: "):
        llm.generate(["good", bad, "fine"], GREEDY, use_tqdm=False)


def test_bad_prompts_return_beside_good_ones(llm):
    prompts = ["good", *(bad for bad, _ in BAD), "fine"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    expected = tokens(llm.generate(["good", "fine"], GREEDY, use_tqdm=False))
    assert tokens([outputs[0], outputs[-1]]) == expected
    for index, (_, error) in enumerate(BAD, start=1):
        assert isinstance(outputs[index].error, error)
        assert f"prompts[{index}]" in str(outputs[index].error)
        assert outputs[index].finished
        assert outputs[index].outputs == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompts": ["a"], "sampling_params": [GREEDY, GREEDY]}, "2 entries for 1"),
        ({"prompts": ["a"], "sampling_params": {"top_p": 1}}, "dict"),
        ({"prompts": {"a"}}, "set"),
        ({"prompts": None}, "NoneType"),
        ({"prompts": ["a"], "on_error": "ignore"}, "on_error"),
        ({"prompts": [1, "a"]}, r"prompts\[0\]"),
    ],
)
def test_bad_calls(llm, arguments, named):
    with pytest.raises(InvalidArgumentError, match=named):
        llm.generate(**arguments)


def broken_after(llm, steps, error):
    """Make the runner raise `error` in its `steps`-th call from now on."""
    execute, calls = llm.engine.runner.execute, []

    def run(plan):
        calls.append(plan)
        if len(calls) == steps:
            raise error
        return execute(plan)

    return run


def test_a_failure_while_running(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 3, RuntimeError("boom")))
        with pytest.raises(EngineError, match="boom"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert llm.engine.kv.slots_held == 0
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 3, RuntimeError("boom")))
        outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False, on_error="return")
    assert [type(output.error) for output in outputs] == [EngineError, EngineError]
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False))


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 4, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert llm.engine.kv.slots_held == 0
    assert not llm.engine.has_unfinished_requests()
    assert len(tokens(llm.generate("a", GREEDY, use_tqdm=False))[0]) == 10


def test_many_more_requests_than_places(make_llm):
    llm = make_llm(slots=8 * 14)
    outputs = llm.generate([[i % 250 + 1] * 4 for i in range(200)], GREEDY, use_tqdm=False)
    assert all(len(each) == 10 for each in tokens(outputs))
    times = [output.metrics.first_scheduled_time for output in outputs]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 3}, "capacity_bytes"),
        ({"kv_cache_memory_bytes": -3}, "kv_cache_memory_bytes"),
        ({"attention_backend": "nobody"}, "nobody"),
        ({"attention_backend": "flash_attn"}, "flash_attn"),
        ({"max_model_len": 4096}, "max_model_len"),
    ],
)
def test_bad_limits(make_llm, limits, named):
    with pytest.raises(InvalidArgumentError, match=named):
        make_llm(**limits)


def test_default_cache_is_never_larger_than_what_can_be_used(tiny_model, byte_tokenizer):
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, max_num_seqs=3)
    assert llm.engine.kv.num_slots == 3 * 128


def test_loading_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path)
    with pytest.raises(InvalidArgumentError, match="enforce_eager"):
        LLM(tmp_path, enforce_eager=False)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        LLM(tmp_path, dtype="int8")
    with pytest.raises(InvalidArgumentError, match="device"):
        LLM(tmp_path, device="tpu")
    with pytest.raises(TypeError, match="swap_space"):
        LLM(tmp_path, swap_space=4)
