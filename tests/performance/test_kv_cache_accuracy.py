"""The comparison of caches, against the model's own forward pass over the whole text."""

import pytest
import torch

from vllm_teach.engine.llm import LLM
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance import compare_kv_caches

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4]]


class NoTokenizer:
    stop_token_ids = ()


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = Decoder(ModelConfig("LlamaForCausalLM", 10, 16, 24, 2, 2, 1, 8, 16)).init_random(seed=2)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(20.0)  # otherwise attention hardly matters
    return LLM.from_loaded(model, NoTokenizer(), block_size=4, num_kv_blocks=20)  # type: ignore[arg-type]


def test_the_exact_side_is_the_models_own_and_the_other_lies_near(llm: LLM) -> None:
    found = compare_kv_caches(llm, TEXTS, block_size=4)
    nlls, choices = [], []
    for text in TEXTS:
        ids = torch.tensor(text)
        logits = llm.model.logits(llm.model(ids, torch.arange(len(ids)), full_causal()))[:-1].double()
        nlls.append(-logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        choices.append(logits.argmax(-1))
    torch.testing.assert_close(found.exact.scores.nlls, torch.cat(nlls), rtol=0, atol=1e-4)
    assert torch.equal(found.exact.choices, torch.cat(choices))
    difference = (found.quantized.scores.nlls - found.exact.scores.nlls).abs()
    assert 1e-4 < difference.mean() < 0.2
    assert found.perplexity_ratio == pytest.approx(
        float(torch.exp((found.quantized.scores.nlls - torch.cat(nlls)).mean())), rel=1e-3
    )
    same = (found.quantized.choices == torch.cat(choices)).double().mean()
    assert found.agreement == float(same) > 0.8
    assert (found.exact.bytes_per_token, found.quantized.bytes_per_token) == (2 * 2 * 8 * 4, 2 * 2 * (8 + 4))
    assert found.bytes_ratio == 12 / 32


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "0 texts"),
        ([[1]], "1 texts, of 1 to 1 tokens"),
        ([[1, 2], *[[3] * 16] * 99], "100 texts, of 2 to 16 tokens"),
    ],
)
def test_texts_that_say_nothing_or_do_not_fit(llm: LLM, texts: list[list[int]], words: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"^texts has {words}: give at least one, each of 2 to 15 tokens\.$"
    ):
        compare_kv_caches(llm, texts)


def test_blocks_of_no_tokens_are_refused(llm: LLM) -> None:
    """Once a division by zero."""
    with pytest.raises(InvalidArgumentError, match="block_size is 0; give a whole number from 1"):
        compare_kv_caches(llm, TEXTS, block_size=0)
