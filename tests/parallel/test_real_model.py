"""SmolLM2 over two and three ranks: one rank's tokens, and hardly more than its share of the weights."""

from pathlib import Path

import pytest
import torch

from vllm_teach import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, humans first",
    "The quick brown fox",
    "My favourite recipe for pancakes is",
    "Photosynthesis is the process by which",
    "To be, or not to be,",
    "import numpy as np\n",
    "The largest planet in the solar system",
    "A haiku about autumn:",
    "Q: What is 12 times 12?\nA:",
    "Dear Sir or Madam,",
    "The theory of relativity states that",
    "List three primary colours:",
    "She opened the door and",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "Long ago, in a distant galaxy,",
]
ARGUMENTS = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_kv_blocks": 120}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.real_model
def test_tokens_and_memory(smollm2_path: Path) -> None:
    """9 query heads and 3 KV heads: 2 + 1 KV heads over two ranks, so rank 0 has a little more than a half."""
    threads = torch.get_num_threads()
    one = LLM(smollm2_path, **ARGUMENTS)
    expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, GREEDY, use_tqdm=False)]
    whole = one.model.num_bytes()
    del one
    for size, share in ((2, 0.54), (3, 0.34)):
        llm = LLM(smollm2_path, tensor_parallel_size=size, **ARGUMENTS)
        try:
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert found == expected
            assert llm.model.num_bytes() <= share * whole, "and no rank has more than rank 0"
        finally:
            llm.close()
    assert torch.get_num_threads() == threads
