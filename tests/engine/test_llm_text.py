"""What `generate` says besides the tokens: text, ends, log-probabilities."""

import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.models.attend import full_causal


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


def test_a_stop_string_counts_from_the_token_behind_min_tokens(llm):
    """Of a text whose n-th token completes the stop string for the first time, min_tokens = n overlooks it."""
    base = {"temperature": 1.0, "seed": 2, "ignore_eos": True, "max_tokens": 30}
    ids = llm.generate("q", SamplingParams(**base), use_tqdm=False)[0].outputs[0].token_ids
    count, stop = next((i + 1, chr(t)) for i, t in enumerate(ids) if 32 < t < 127 and ids.count(t) == 1)
    for min_tokens, length, reason in ((count - 1, count, stop), (count, 30, None)):
        params = SamplingParams(**base, stop=stop, min_tokens=min_tokens)
        completion = llm.generate("q", params, use_tqdm=False)[0].outputs[0]
        assert (len(completion.token_ids), completion.stop_reason) == (length, reason)


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
        temperature=100.0, max_tokens=60, min_tokens=60, seed=1, stop_token_ids=list(range(0, 259, 2))
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
    plain = llm.generate([3, 4], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0]
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None
