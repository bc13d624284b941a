"""A model that computes NaN or infinity for some tokens: these requests end with an error, and nothing is kept."""

import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineError

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
BROKEN = 99  # the token whose rows the model breaks


class BrokenModel:
    """`model`, but the hidden states of the token BROKEN are `value`, and the logits what `change` makes of them."""

    def __init__(self, model, value=torch.nan, change=lambda logits: logits):
        self.model, self.value, self.change = model, value, change
        self.config, self.dtype, self.device = model.config, model.dtype, model.device

    def __call__(self, token_ids, positions, attend):
        hidden = self.model(token_ids, positions, attend)
        return hidden.masked_fill((token_ids == BROKEN)[:, None], self.value)

    def logits(self, hidden):
        return self.change(self.model.logits(hidden))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_chunk_is_in_no_prefix_cache(make_llm, monkeypatch, assert_empty, prefix_cache, n):
    """The chunk draws no token, so nobody looks at its logits; but whose prompt begins alike would start from it."""
    llm = make_llm(prefix_cache=prefix_cache, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    prompt = [1, 2, 3, 4, BROKEN, 6, 7, 8] * 3
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, n=n)
    expected = make_llm().generate([prompt, [5, 6]], params, use_tqdm=False)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "model", BrokenModel(llm.engine.runner.model))
        outputs = llm.generate([prompt, [5, 6]], params, use_tqdm=False, on_error="return")
    assert str(outputs[0].error).startswith("the model's hidden states hold NaN or infinite values for this request: ")
    assert [each.finish_reason for each in outputs[0].outputs] == ["error"] * n
    assert outputs[1].outputs == expected[1].outputs
    assert_empty(llm.engine)
    again = llm.generate([prompt], params, use_tqdm=False)[0]
    assert (again.num_cached_tokens, again.outputs) == (0, expected[0].outputs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_breaks_its_own_step_ends_its_sequence_alone(llm, monkeypatch, value):
    expected = llm.generate([[4, 5, 6]], PARAMS, use_tqdm=False)[0].outputs
    monkeypatch.setattr(llm.engine.runner, "model", BrokenModel(llm.engine.runner.model, value))
    caller = SamplingParams(max_tokens=5, logit_bias={BROKEN: 100}, temperature=0)
    outputs = llm.generate([[1, 2, 3], [4, 5, 6]], [caller, PARAMS], use_tqdm=False, on_error="return")
    assert isinstance(outputs[0].error, EngineError)
    assert outputs[0].outputs[0].token_ids == [BROKEN]
    assert outputs[1].outputs == expected


@pytest.mark.parametrize("where", ["hidden states", "logits"])
def test_log_probabilities_of_a_prompt_are_numbers_or_an_error(llm, monkeypatch, where):
    """Behind a window the last token may be sound where one in the middle is not: it would be drawn from as if."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=3, prompt_logprobs=0, n=2)
    expected = llm.generate([[4, 5, 6]], params, use_tqdm=False)[0]

    def break_five(logits):  # of the prompt of six, five predict another of its tokens
        return logits * torch.nan if len(logits) == 5 else logits

    real = llm.engine.runner.model
    model = BrokenModel(real) if where == "hidden states" else BrokenModel(real, 0.0, break_five)
    monkeypatch.setattr(llm.engine.runner, "model", model)
    outputs = llm.generate([[1, 2, BROKEN, 3, 2, 1], [4, 5, 6]], params, use_tqdm=False, on_error="return")
    assert str(outputs[0].error).startswith(f"the model's {where} hold NaN or infinite values for this request: ")
    assert outputs[0].prompt_logprobs == [None]
    assert outputs[1].outputs == expected.outputs
    assert len(outputs[1].prompt_logprobs) == 3
