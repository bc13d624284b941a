"""`LLM` and the cache: what is shared with whom, what a pattern gives back, who goes first."""

import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.engine.events import Admitted, Finished, Preempted
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.models.attend import full_causal

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(40, 60))  # five blocks of 4


def cached(outputs) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def test_only_the_same_salt_shares(make_llm):
    llm = make_llm()
    prompts = [{"prompt_token_ids": PROMPT}] + [
        {"prompt_token_ids": PROMPT, "cache_salt": salt} for salt in ("mine", "yours")
    ]
    found = [[cached(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in prompts] for _ in range(2)]
    assert found == [[0, 0, 0], [16, 16, 16]]


def test_a_stream_keeps_its_salt(make_llm):
    llm = make_llm()
    for salt in ("mine", "yours"):
        list(llm.stream({"prompt_token_ids": PROMPT, "cache_salt": salt}, GREEDY))
    assert [event.num_cached_tokens for event in llm.engine.events.of(Admitted)] == [0, 0]


def test_reset_prefix_cache_forgets_and_harms_no_running_request(make_llm, assert_empty):
    llm = make_llm()
    expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    pieces = llm.stream({"prompt_token_ids": PROMPT}, GREEDY)
    next(pieces)
    llm.engine.reset_prefix_cache()
    list(pieces)
    assert llm.engine.kv.pool.num_idle <= 2  # at most what the stream computed since
    again = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, expected)
    assert_empty(llm.engine)


def test_without_prefix_caching_nothing_is_kept(make_llm):
    llm = make_llm(enable_prefix_caching=False)
    assert cached([llm.generate([PROMPT], GREEDY, use_tqdm=False)[0] for _ in range(2)]) == [0, 0]
    assert llm.engine.kv.pool.num_idle == 0


def test_a_shared_system_prompt_is_computed_once(make_llm):
    llm = make_llm()
    first = llm.generate([[*PROMPT, 1]], GREEDY, use_tqdm=False)
    rest = llm.generate([[*PROMPT, i] for i in range(2, 30)], GREEDY, use_tqdm=False)
    assert cached(first) == [0]
    assert cached(rest) == [20] * 28
    assert llm.engine.kv.usage().hit_tokens == 20 * 28


@pytest.mark.parametrize("chunk", [64, 8])
def test_prompt_logprobs_are_the_models_own(make_llm, tiny_model, chunk):
    """Computed whole or in chunks, and never from the prefix cache, which has no logits."""
    llm = make_llm(max_num_batched_tokens=chunk, max_num_seqs=4)
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, n=1)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    raw = tiny_model.logits(tiny_model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), full_causal())).log_softmax(-1)
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
        likeliest = raw[position - 1].topk(2).indices.tolist()
        assert set(entries) == {PROMPT[position], *likeliest}
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(raw[position - 1, token_id].item(), abs=1e-4)
            assert entry.rank == 1 + int((raw[position - 1] > raw[position - 1, token_id]).sum())
            assert entry.decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].prompt_logprobs is None


def test_prompt_logprobs_of_one_token_and_with_siblings(make_llm):
    llm = make_llm()
    params = SamplingParams(n=3, seed=1, max_tokens=3, prompt_logprobs=0)
    for prompt in ([5], [5, 6, 7]):
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert output.prompt_logprobs[0] is None
        assert [list(each) for each in output.prompt_logprobs[1:]] == [[token] for token in prompt[1:]]


def test_prompt_logprobs_survive_a_preemption(make_llm):
    small = {"blocks": 10, "max_model_len": 40, "watermark": 0, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    params = [SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, prompt_logprobs=0)] * 2
    outputs = {}
    for name, limits in (("roomy", {}), ("small", small)):
        llm = make_llm(**limits)
        outputs[name] = llm.generate([[1] * 12, [2] * 12], params, use_tqdm=False)
        assert bool(llm.engine.events.of(Preempted)) == (name == "small")
    for one, other in zip(outputs["roomy"], outputs["small"], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {t: e.logprob for t, e in a.items()} == pytest.approx({t: e.logprob for t, e in b.items()}, abs=1e-4)


def test_a_bias_decides_what_is_said(make_llm):
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={65: 100})
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].text == "AAAA"
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[0\]: logit_bias={259: 1.0} is not valid"):
        llm.generate("x", SamplingParams(logit_bias={259: 1}), use_tqdm=False)


def test_the_smallest_priority_goes_first(make_llm):
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    llm.generate(["a", "b", "c"], GREEDY, priority=[5, -1, 2], use_tqdm=False)
    assert [event.seq_id for event in llm.engine.events.of(Finished)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("priority", "named"),
    [([1], r"priority=\[1\]"), (3, "priority=3"), ([1, "high"], r"prompts\[1\]: priority='high'")],
)
def test_bad_priorities(llm, priority, named):
    with pytest.raises(InvalidArgumentError, match=f"^{named} is not valid"):
        llm.generate(["a", "b"], GREEDY, priority=priority, use_tqdm=False)


@pytest.mark.parametrize("chunk", [256, 8])
def test_a_pattern_runs_in_prefill_and_decode_and_gives_blocks_back(make_llm, tiny_model, chunk):
    """A window of 8 keys with 4 sinks, against the model run without a cache under the same pattern's mask."""
    pattern = (LocalWindow(7, 0) | GlobalTokens(4)) & Causal()
    llm = make_llm(attention_pattern=pattern, max_num_batched_tokens=chunk, max_num_seqs=4)
    prompt = [3 + i * 7 % 200 for i in range(30)]
    engine = llm.engine
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), "a")
    sequence = engine.get_request("a").sequences[0]
    while engine.has_unfinished_requests():
        engine.step()
        if not sequence.finished and sequence.output_token_ids:
            held = [block for block in engine.kv.table(sequence.seq_id).blocks if block != NO_BLOCK]
            assert len(held) <= 1 + 4  # the sinks' block, the window's three or four
    ids = list(prompt)
    for token_id in sequence.output_token_ids:
        hidden = tiny_model(torch.tensor(ids), torch.arange(len(ids)), masked(pattern))
        assert int(tiny_model.logits(hidden[-1:]).argmax()) == token_id
        ids.append(token_id)
    assert sequence.output_token_ids != llm_without(make_llm, prompt)


def masked(pattern):
    """An `attend` for one sequence without a cache, under `pattern`'s mask."""

    def attend(layer, q, k, v, *, window=None):
        group = q.shape[1] // k.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1).transpose(0, 1) for each in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~pattern.mask(len(q), len(k)), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1)

    return attend


def llm_without(make_llm, prompt):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return make_llm().generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
