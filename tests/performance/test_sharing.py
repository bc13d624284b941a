"""What sharing saves, counted on the tiny model, and the check against the model without a cache."""

from dataclasses import replace

import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.sharing import Sharing, follow_beams, follow_samples
from vllm_teach.performance.uncached_error import uncached_error

PROMPT = list(range(40, 66))  # 26 tokens: one block of 16 and a part


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", num_kv_blocks=200, enable_prefix_caching=False)


def params(n: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_share_the_prompts_full_blocks(llm, n) -> None:
    sharing = follow_samples(llm.engine, [PROMPT], params(n, 12))  # 37 tokens are computed: 3 blocks each
    assert (sharing.peak, sharing.peak_listed, sharing.copies) == (1 + 2 * n, 3 * n, n - 1)
    assert sharing.listed[0] == 2 * n
    assert sharing.held[0] == 2, "before the first write the block that is not full is shared as well"
    assert all(held <= listed for held, listed in zip(sharing.held, sharing.listed, strict=True))
    assert (sharing.saved == 0) == (n == 1)


def test_requests_apart_share_nothing_without_a_prefix_cache(llm) -> None:
    sharing = follow_samples(llm.engine, [PROMPT] * 3, params(1, 12))
    assert (sharing.saved, sharing.peak, sharing.copies) == (0, 9, 0)


def test_beams_share_more_than_samples(llm) -> None:
    beams = follow_beams(llm.engine, [PROMPT], BeamSearchParams(4, max_tokens=40, ignore_eos=True))
    samples = follow_samples(llm.engine, [PROMPT], params(4, 40))
    assert beams.saved > samples.saved
    assert len(beams.held) == 39, "after the last step nothing is held"
    assert max(beams.listed) == 4 * 4  # 26 + 38 tokens have slots when the last beams are chosen
    assert llm.engine.kv.usage().held_blocks == 0


def test_nothing_noted_saves_nothing() -> None:
    assert (Sharing().saved, Sharing().peak, Sharing().peak_listed) == (0.0, 0, 0)


def test_the_engine_agrees_with_the_model_alone_and_a_wrong_number_does_not(llm) -> None:
    output = llm.generate([PROMPT], replace(params(3, 6), logprobs=0), use_tqdm=False)[0]
    assert uncached_error(llm.model, output) < 1e-3
    token = output.outputs[1].token_ids[2]
    entry = output.outputs[1].logprobs[2][token]
    output.outputs[1].logprobs[2][token] = replace(entry, logprob=entry.logprob - 0.5)
    assert uncached_error(llm.model, output) == pytest.approx(0.5, abs=1e-3)


def test_an_output_without_logprobs_is_refused(llm) -> None:
    with pytest.raises(InvalidArgumentError, match="logprobs=0"):
        uncached_error(llm.model, llm.generate([PROMPT], params(1, 2), use_tqdm=False)[0])
