"""`LLM`'s other two entrances: a model that transformers computes, and beam search."""

import pytest

from vllm_teach import LLM, BeamSearchParams, SamplingParams
from vllm_teach.engine import search_beams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.hugging_face import HuggingFaceModel

PROMPTS = ["def read(", "class Node:", "import os\n"]
LIMITS = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 32}


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", **LIMITS)


def test_a_model_computed_by_transformers_says_the_same(tiny: LLM) -> None:
    theirs = LLM("tiny", hf=True, **LIMITS)
    assert isinstance(tiny.model, Decoder)
    assert isinstance(theirs.model, HuggingFaceModel)
    params = SamplingParams(temperature=0, max_tokens=24)
    ours, others = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (tiny, theirs))
    assert [each.outputs[0].token_ids for each in others] == [each.outputs[0].token_ids for each in ours]


def test_limits_of_such_a_model_are_checked_when_it_is_loaded() -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len=100000 is not valid"):
        LLM("tiny", hf=True, **LIMITS, max_model_len=100_000)


def test_beam_search_takes_one_prompt_or_several_and_shows_a_bar(tiny: LLM, capsys) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found = tiny.beam_search(PROMPTS, params)
    assert "prompts: 100%" in capsys.readouterr().err
    expected = search_beams(tiny.engine, list(PROMPTS), params)
    texts = [[each.text for each in output.sequences] for output in found]
    assert texts == [[each.text for each in output.sequences] for output in expected]
    (one,) = tiny.beam_search(PROMPTS[0], params, use_tqdm=False)
    assert [each.text for each in one.sequences] == texts[0]
    assert capsys.readouterr().err == ""
