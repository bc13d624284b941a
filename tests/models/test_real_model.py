"""The fetched SmolLM2: its ids, its logits beside transformers', and the memory that loading takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_teach.models import full_causal, load_model, load_tokenizer

pytestmark = pytest.mark.real_model

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text(encoding="utf-8"))["cases"]

# Prints how far the private memory rose over its value before, as a multiple of the weights. A fresh process, so that
# memory that earlier tests freed cannot hide what loading takes; sampled by a thread that does nothing else.
MEMORY = """
import sys, threading, psutil, torch
from vllm_teach.models.load import load_model

process, peak, done = psutil.Process(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, process.memory_full_info().uss)
        done.wait(0.001)

before = process.memory_full_info().uss
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], getattr(torch, sys.argv[2]))
after = process.memory_full_info().uss
done.set()
watcher.join()
weights = sum(parameter.nbytes for parameter in model.parameters())
print((max(peak, after) - before) / weights, (after - before) / weights)
"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_ids_equal_llama_cpps_for_all_texts(tokenizer):
    assert len(CASES) == 30
    wrong = [case["text"] for case in CASES if tokenizer.encode(case["text"]) != case["ids"]]
    assert wrong == []


def test_transformers_users_of_the_directory_get_the_same_ids(smollm2_path):
    theirs = AutoTokenizer.from_pretrained(smollm2_path)
    wrong = [case["text"] for case in CASES if theirs.encode(case["text"]) != case["ids"]]
    assert wrong == []


def test_every_text_comes_back(tokenizer):
    for case in CASES:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_facts_about_the_model(smollm2_path, tokenizer):
    model = load_model(smollm2_path, torch.bfloat16)
    config = model.config
    assert (config.num_layers, config.hidden_size, config.num_q_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_position) == (64, 49_152, 8192)
    assert (config.rope_theta, config.rms_norm_eps) == (100_000.0, 1e-5)
    assert config.tie_word_embeddings
    assert model.num_parameters() == 134_515_008
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.stop_token_ids) == (1, 2, (2,))
    assert tokenizer.vocab_size == 49_152
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_logits_equal_transformers_in_float32(smollm2_path, tokenizer):
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, attn_implementation="eager")
    model = load_model(smollm2_path, torch.float32)
    texts = ["The capital of France is", "def f(x):\n    return x**2\n", "Once upon a time there was a robot. " * 12]
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0]
        actual = model.logits(model(ids, torch.arange(len(ids)), full_causal("sdpa")))
        difference = (actual - expected).abs().max().item()
        assert difference <= 1e-3, text
    assert len(ids) > 100


def test_the_model_knows_its_capital(smollm2_path, tokenizer):
    # Weights in a wrong order would agree with themselves in every reader, and say something else.
    model = load_model(smollm2_path, torch.bfloat16)
    ids = torch.tensor(tokenizer.encode("The capital of France is"))
    hidden = model(ids, torch.arange(len(ids)), full_causal("sdpa"))
    assert tokenizer.decode([model.logits(hidden)[-1].argmax().item()]) == " Paris"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no comparable figure for private memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_at_most_1_3_times_the_weights(dtype, smollm2_path):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(smollm2_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, after = map(float, run.stdout.split())
    assert after >= 0.95, "the measurement misses the weights themselves"
    assert peak <= 1.3
