"""Requests that share a cache's slots get what each would get alone."""

import ctypes
import random
import sys
import types

import numpy as np
import pytest

from vllm_teach.performance.peer_process.server import load_llama_cpp, serve_in_slots


class Model:
    """Answers as a model would whose next token is a function of all tokens before it, and minds its cache."""

    def __init__(self, batch_tokens: int) -> None:
        self.slots: dict[int, list[int]] = {}
        self.outputs: list[list[int]] = []
        self.batch_tokens, self.steps, self.most = batch_tokens, 0, 0

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        assert 0 < len(entries) <= self.batch_tokens
        self.steps += 1
        found = []
        for slot, position, token, wanted in entries:
            held = self.slots.setdefault(slot, [])
            assert position == len(held)
            held.append(token)
            if wanted:
                found.append(self.successor(held))
        self.most = max(self.most, len(self.slots))
        return found

    @staticmethod
    def successor(tokens: list[int]) -> int:
        return hash(tuple(tokens)) % 1000

    def free(self, slot: int) -> None:
        held = self.slots.pop(slot)
        self.outputs.append([*held, self.successor(held)])


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(Model.successor(tokens))
    return tokens


@pytest.mark.parametrize(("num_slots", "batch_tokens"), [(1, 30), (3, 30), (16, 40), (50, 500)])
def test_each_request_gets_what_it_gets_alone(num_slots, batch_tokens):
    draw = random.Random(num_slots)
    prompts = [[draw.randrange(1000) for _ in range(draw.randint(1, 25))] for _ in range(40)]
    counts = [draw.randint(1, 20) for _ in prompts]
    model = Model(batch_tokens)
    assert serve_in_slots(prompts, counts, model.decode, model.free, num_slots, batch_tokens) == counts
    assert sorted(model.outputs) == sorted(alone(prompt, n) for prompt, n in zip(prompts, counts, strict=True))
    assert not model.slots
    assert model.most == min(num_slots, model.most) > (0 if num_slots == 1 else 1)


def test_a_place_that_is_free_is_taken_at_once():
    model = Model(100)
    serve_in_slots([[1]] * 4, [8, 2, 2, 4], model.decode, model.free, 2, 100)
    assert model.steps == 8  # 8 beside 2 + 2 + 4


@pytest.fixture
def llama_cpp(monkeypatch):
    """A stand-in for the bindings: its successor of a token is the token after it. `seen` has what it was asked."""
    seen: list[tuple] = []

    class Batch:
        def __init__(self, size: int) -> None:
            self.n_tokens = 0
            self.token, self.pos, self.logits, self.n_seq_id = ([None] * size for _ in range(4))
            self.seq_id = [[None] for _ in range(size)]

    def decode(context, batch):
        rows = zip(batch.token, batch.pos, batch.seq_id, batch.logits, batch.n_seq_id, strict=True)
        seen.append([(t, p, s[0], bool(w), n) for t, p, s, w, n in list(rows)[: batch.n_tokens]])
        context["batch"] = batch
        return 0

    rows = np.eye(10, dtype=np.float32)

    def logits(context, i):
        successor = (context["batch"].token[i] + 1) % 10
        return rows[successor].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    fake = types.SimpleNamespace(
        __version__="1.2",
        llama_backend_init=lambda: None,
        llama_model_default_params=lambda: None,
        llama_model_load_from_file=lambda path, params: path,
        llama_context_default_params=types.SimpleNamespace,
        llama_init_from_model=lambda weights, params: {"params": params},
        llama_get_memory=lambda context: context,
        llama_model_get_vocab=lambda weights: weights,
        llama_vocab_n_tokens=lambda vocab: 10,
        llama_batch_init=lambda tokens, embd, seqs: Batch(tokens),
        llama_decode=decode,
        llama_get_logits_ith=logits,
        llama_memory_seq_rm=lambda memory, slot, first, last: seen.append(("free", slot, first, last)),
    )
    fake.seen = seen
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    return fake


def test_llama_cpps_batches_are_filled_field_by_field(llama_cpp):
    serve, version, how = load_llama_cpp("model.gguf", "bfloat16", threads=2, max_len=16, max_seqs=2, cache_bytes=0)
    assert (version, how) == ("1.2", "continuous batching, 2 slots, bfloat16, KV cache float16")
    assert serve([[3, 4], [7]], [2, 1]) == [2, 1]
    assert llama_cpp.seen == [
        [(3, 0, 0, False, 1), (4, 1, 0, True, 1), (7, 0, 1, True, 1)],
        ("free", 1, -1, -1),
        [(5, 2, 0, True, 1)],
        ("free", 0, -1, -1),
    ]


@pytest.mark.parametrize(("max_len", "max_seqs", "tokens"), [(100, 8, 2048), (2040, 64, 2104), (5000, 8, 5008)])
def test_the_longest_prompt_fits_beside_all_that_decode(llama_cpp, monkeypatch, max_len, max_seqs, tokens):
    sizes: list[int] = []
    real = llama_cpp.llama_batch_init
    monkeypatch.setattr(llama_cpp, "llama_batch_init", lambda size, *more: sizes.append(size) or real(size, *more))
    load_llama_cpp("model.gguf", "bfloat16", threads=2, max_len=max_len, max_seqs=max_seqs, cache_bytes=0)
    assert sizes == [tokens]
