"""Beam search on the real model against transformers' `generate(num_beams=4)`, same directory, float32.

At least 18 of 20 prompts give the same best text. A difference is explained by two texts whose scores lie within 1e-3
of each other under the reference's own logits, so that rounding decides; it is printed.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_teach import LLM
from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.engine.beam_search import search_beams

pytestmark = pytest.mark.real_model

PARAMS = BeamSearchParams(beam_width=4, max_tokens=16)
TIE = 1e-3
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is photosynthesis?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "El agua hierve a",
    "日本の首都は",
    "A 🐈 and a 🐕 walk into a bar.",
    "a",
    "The three laws of motion are:\n1.",
    '{"name": "Alice", "age": 30, "city":',
    "To be, or not to be, that is",
    "import numpy as np\n\nx = np.",
    "Water is made of",
    "The lighthouse keeper counted the ships that passed, and wrote each name into a long grey book. " * 3,
]


@pytest.fixture(autouse=True, scope="module")
def one_thread_from_the_start():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def score(reference, prompt: list[int], new: list[int]) -> float:
    """Return the score of `new` under the reference's own logits, recomputed without any cache."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + new[:-1]]), logits_to_keep=len(new)).logits[0].log_softmax(-1)
    return logits[range(len(new)), new].sum().item() / len(new) ** PARAMS.length_penalty


def test_equals_transformers(smollm2_path) -> None:
    llm = LLM(smollm2_path, dtype="float32", device="cpu", kv_cache_memory_bytes=2**28)
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, local_files_only=True).eval()
    ends = llm.tokenizer.stop_token_ids
    kept = BeamSearchParams(PARAMS.beam_width, PARAMS.max_tokens, include_stop_str_in_output=True)
    outputs = search_beams(llm.engine, PROMPTS, kept)
    assert llm.engine.kv.usage().held_blocks == 0
    same = 0
    for text, output in zip(PROMPTS, outputs, strict=True):
        prompt = llm.tokenizer.encode(text)
        ids = torch.tensor([prompt])
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=PARAMS.beam_width,
            max_new_tokens=PARAMS.max_tokens,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
        )[0, len(prompt) :].tolist()
        length = next((place + 1 for place, token in enumerate(found) if token in ends), len(found))
        expected, ours = found[:length], output.sequences[0].tokens[len(prompt) :]
        assert output.sequences[0].score == pytest.approx(score(reference, prompt, ours), abs=TIE)
        if ours == expected:
            same += 1
            continue
        gap = score(reference, prompt, expected) - score(reference, prompt, ours)
        print(f"{text[:30]!r}: {ours} for {expected}, whose score is {gap:.1e} better")
        assert abs(gap) < TIE
    print(f"{same} of {len(PROMPTS)} prompts have transformers' best text")
    assert same >= 18
