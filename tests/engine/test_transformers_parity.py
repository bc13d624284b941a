"""The engine's greedy tokens on the real model against transformers, same directory, float32.

Each token the engine chose is compared with transformers' own most likely token after the same prefix, so all 20 x 32
are judged, even behind a difference. A difference is excused only where the reference's two largest logits lie within
1e-3 of each other, and is printed.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_teach import LLM, SamplingParams

pytestmark = pytest.mark.real_model

NEW_TOKENS = 32
TIE = 1e-3
STORY = "The lighthouse keeper counted the ships that passed, and wrote each name into a long grey book. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is photosynthesis?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "El agua hierve a",
    "日本の首都は",
    "A 🐈 and a 🐕 walk into a bar.",
    "a",
    "\n\n",
    "The three laws of motion are:\n1.",
    '{"name": "Alice", "age": 30, "city":',
    "To be, or not to be, that is",
    "import numpy as np\n\nx = np.",
    STORY * 6,
    STORY * 20 + "On the last page he wrote",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread_from_the_start():
    """The module's fixtures generate too. Threads that fight for busy cores take many times as long as one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    llm = LLM(smollm2_path, dtype="float32", device="cpu", kv_cache_memory_bytes=2**28)
    yield llm
    assert llm.engine.kv.pool.num_held == 0


@pytest.fixture(scope="module")
def reference(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def batched(llm):
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return llm.generate(PROMPTS, params, use_tqdm=False)


def differences(reference, output):
    """Return (step, ours, theirs, gap of the reference's top two) for each token that is not the reference's."""
    tokens = output.outputs[0].token_ids
    ids = torch.tensor([output.prompt_token_ids + tokens[:-1]])
    with torch.inference_mode():
        logits = reference(ids, logits_to_keep=len(tokens)).logits[0]
    top = logits.topk(2)
    gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
    theirs = top.indices[:, 0].tolist()
    return [(step, a, b, gaps[step]) for step, (a, b) in enumerate(zip(tokens, theirs, strict=True)) if a != b]


def judge(reference, outputs):
    assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
    found = {output.prompt: differences(reference, output) for output in outputs}
    for prompt, each in found.items():
        for step, ours, theirs, gap in each:
            print(f"{prompt[:30]!r} step {step}: {ours} for {theirs}, the reference's top two lie {gap:.1e} apart")
    assert all(gap < TIE for each in found.values() for *_, gap in each)


def test_batched(reference, batched):
    assert len(PROMPTS) == 20
    judge(reference, batched)


def test_alone(llm, reference, batched):
    """One prompt at a time: the same tokens as in the batch, or a near tie of the reference."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [len(output.outputs[0].token_ids) for output in alone] == [NEW_TOKENS] * len(PROMPTS)
    # Same tokens, same verdict: only what differs from the batch needs the reference again.
    different = [a for a, b in zip(alone, batched, strict=True) if a.outputs[0].token_ids != b.outputs[0].token_ids]
    judge(reference, different)


def test_transformers_own_generate(reference, batched):
    """The reference's own loop with its own cache, for four prompts; a near tie ends the comparison."""
    for index in (0, 3, 10, 18):
        output = batched[index]
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        ties = [step for step, *_ in differences(reference, output)]
        upto = ties[0] if ties else NEW_TOKENS
        assert output.outputs[0].token_ids[:upto] == expected[:upto]


def test_a_wrong_token_would_be_found(reference, batched):
    output = batched[0]
    good = list(output.outputs[0].token_ids)
    try:
        output.outputs[0].token_ids[5] = 42
        assert (5, 42, good[5]) in [each[:3] for each in differences(reference, output)]
        with pytest.raises(AssertionError):
            judge(reference, [output])
    finally:
        output.outputs[0].token_ids[:] = good
