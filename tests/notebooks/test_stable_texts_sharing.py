"""The tokens that lesson 07 compares are the same on every machine: no choice among them is close.

See test_stable_texts.py: a greedy choice survives another order of addition if the best logit leads by far more.
"""

from unittest.mock import patch

import pytest
import torch

from vllm_teach import LLM, SamplingParams
from vllm_teach.kvcache import hash_prefix_cache
from vllm_teach.kvcache.hash_prefix_cache import hash_block
from vllm_teach.models import Decoder, full_causal
from vllm_teach.performance.prefix_traces import shared_prompt
from vllm_teach.teaching import help_desk

LEAD = 1e-2
STORY = "Once upon a time there was a small dog who lived in a house by the sea with an old man and his"
REST = (
    "It is a beautiful country, and I still speak the language of my country with my family. "
    "The language that I speak with my family is"
)


def leads(model: Decoder, ids: list[int], count: int = 1) -> list[float]:
    """By how much the best logit leads at each of `count` greedy steps after `ids`."""
    found = []
    for _ in range(count):
        logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), full_causal())[-1:])[0]
        best = logits.topk(2)
        found.append(float(best.values[0] - best.values[1]))
        ids = [*ids, int(best.indices[0])]
    return found


def test_the_tiny_models_first_tokens() -> None:
    model = LLM("tiny", dtype="float32", num_kv_blocks=50).model
    found = [leads(model, list(visit.prompt))[0] for visit in shared_prompt(50, 150, 25)]
    assert min(found) > LEAD, sorted(found)[:3]


@pytest.mark.real_model
def test_the_real_models_tokens(smollm2_path) -> None:
    llm = LLM(smollm2_path, dtype="float32", num_kv_blocks=70, max_model_len=512, block_size=8)
    found = leads(llm.model, llm.tokenizer.encode(STORY)[:16], 4)
    for messages in help_desk.questions()[:8]:
        found += leads(llm.model, llm.chat_prompt(messages)["prompt_token_ids"])
    assert min(found) > LEAD, found


@pytest.mark.real_model
def test_the_wrong_keys_answer(smollm2_path) -> None:
    """With tokens alone as the key the second user speaks the first one's language, and by a wide margin."""
    llm = LLM(smollm2_path, dtype="float32", num_kv_blocks=60, max_model_len=256, block_size=8)
    encode = llm.tokenizer.encode
    begin = {name: encode(f"I was born in {name}.\n") for name in ("Spain", "Germany")}
    begin = {name: ids + encode("\n") * (8 - len(ids)) for name, ids in begin.items()}
    users = [begin["Spain"] + encode(REST), begin["Germany"] + encode(REST)[1:4], begin["Germany"] + encode(REST)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    for key, word in ((hash_block, " German"), (lambda parent, block: hash_block(b"", block), " Spanish")):
        llm.engine.reset_prefix_cache()
        with patch.object(hash_prefix_cache, "hash_block", key):
            completion = [llm.generate([ids], params, use_tqdm=False)[0] for ids in users][-1].outputs[0]
        first, second = sorted((entry.logprob for entry in completion.logprobs[0].values()), reverse=True)[:2]
        assert completion.text == word
        assert first - second > 1
