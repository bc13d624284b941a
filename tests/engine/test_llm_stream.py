"""`stream`: pieces that join to the text, and their cleanup."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError


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
    assert llm.engine.kv.pool.num_held > 0
    pieces.close()
    assert llm.engine.kv.pool.num_held == 0


def test_generate_while_a_stream_is_open(llm):
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=30, ignore_eos=True)
    expected = llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
    pieces = llm.stream("x", params)
    begun = next(pieces)
    llm.generate(["a", "b"], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert begun + "".join(pieces) == expected
