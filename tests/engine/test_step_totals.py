"""What all steps came to, against the requests that they served."""

import pytest
import torch

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineError, OutOfMemoryError


def test_tokens_of_prompts_and_answers_are_those_of_the_requests(make_llm) -> None:
    llm = make_llm(max_num_batched_tokens=7, max_num_seqs=4)  # prompts are computed in chunks
    params = SamplingParams(n=2, max_tokens=6, seed=3, ignore_eos=True)
    shared = list(range(30))
    outputs = [
        llm.generate([shared, [9] * 11], params, use_tqdm=False),
        llm.generate([[*shared, 4]], params, use_tqdm=False),
    ]
    totals = llm.engine.totals
    assert totals.prompt_tokens == 30 + 11 + 31
    assert totals.generation_tokens == 3 * 2 * 6
    assert sum(len(each.token_ids) for out in outputs for one in out for each in one.outputs) == 3 * 2 * 6
    cached = outputs[1][0].num_cached_tokens
    assert cached > 0
    assert totals.prefill_tokens == 30 + 11 + 31 - cached
    assert totals.decode_tokens == 3 * 2 * 5  # the first token of each is drawn by its prefill
    counts, total = totals.tokens.read()
    assert sum(counts) == sum(totals.seconds.read().counts) == llm.engine.events.step
    assert total == totals.prefill_tokens + totals.decode_tokens


def test_a_prompt_computed_again_after_a_preemption_counts_once(make_llm) -> None:
    llm = make_llm(blocks=12, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    llm.generate([[token] * 20 for token in range(3)], params, use_tqdm=False)
    assert llm.engine.scheduler.preemptions["recompute"] > 0
    assert llm.engine.totals.prompt_tokens == 60
    assert llm.engine.totals.generation_tokens == 60
    assert llm.engine.totals.prefill_tokens > 60


@pytest.mark.parametrize(
    ("error", "kind", "counted"),
    [
        (MemoryError(), OutOfMemoryError, 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemoryError, 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), OutOfMemoryError, 1),
        (RuntimeError("shapes cannot be multiplied"), EngineError, 0),
        (ValueError("out of memory is what this text is about"), EngineError, 0),
    ],
)
def test_steps_without_memory_are_counted_apart(error: Exception, kind: type, counted: int, llm, monkeypatch) -> None:
    def fail(plan):
        raise error

    monkeypatch.setattr(llm.engine.runner, "execute", fail)
    outputs = llm.generate([[1, 2], [3, 4]], on_error="return", use_tqdm=False)
    assert [type(each.error) for each in outputs] == [kind, kind]
    assert llm.engine.totals.out_of_memory == counted
    assert llm.engine.totals.generation_tokens == llm.engine.totals.prompt_tokens == 0


def test_what_pytorch_says_on_a_cpu_without_memory_is_known(llm, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine.runner, "execute", lambda plan: torch.empty(2**60, dtype=torch.uint8))
    (output,) = llm.generate([[1, 2]], on_error="return", use_tqdm=False)
    assert type(output.error) is OutOfMemoryError
