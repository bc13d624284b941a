"""An engine's limits: each is refused by its own name, before the weights are loaded."""

import json

import numpy as np
import pytest

from vllm_teach import LLM
from vllm_teach.engine import llm as llm_module
from vllm_teach.engine.config import EngineConfig
from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BAD = [
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_num_seqs": 2.0}, "max_num_seqs=2.0"),
    ({"max_num_seqs": 4096}, "max_num_batched_tokens=2048"),
    ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3"),
    ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens='many'"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
    ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization=1.1"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'"),
    ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True"),
    ({"kv_cache_memory_bytes": -3}, "kv_cache_memory_bytes=-3"),
    ({"kv_cache_memory_bytes": "1G"}, "kv_cache_memory_bytes='1G'"),
    ({"max_model_len": "128"}, "max_model_len='128'"),
    ({"max_model_len": [1]}, r"max_model_len=\[1\]"),
    ({"max_model_len": -5}, "max_model_len=-5"),
    ({"max_model_len": 0}, "max_model_len=0"),
    ({"max_model_len": 1}, "max_model_len=1"),
    ({"max_model_len": True}, "max_model_len=True"),
    ({"max_model_len": 64.0}, "max_model_len=64.0"),
    ({"seed": [1.5]}, r"seed=\[1.5\]"),
    ({"seed": None}, "seed=None"),
    ({"attention_backend": ["sdpa"]}, r"attention_backend=\['sdpa'\]"),
]
BAD_FOR_THE_MODEL = [
    ({"max_model_len": 4096}, "max_model_len=4096"),
    ({"max_model_len": 129}, "max_model_len=129"),
    ({"attention_backend": "nobody"}, "nobody"),
    ({"attention_backend": "flash_attn"}, "attention_backend='flash_attn'"),
]


@pytest.mark.parametrize(("limits", "named"), BAD)
def test_bad_limits_are_refused_before_anything_is_looked_for(tmp_path, tiny_model, byte_tokenizer, limits, named):
    for start in (lambda: LLM(tmp_path / "absent", **limits), lambda: EngineConfig(**limits)):
        with pytest.raises(InvalidArgumentError, match=f"^{named} .*\\.$"):
            start()
    # Nothing here depends on `kv_cache_memory_bytes` being given.
    with pytest.raises(InvalidArgumentError, match=f"^{named} "):
        LLM.from_loaded(tiny_model, byte_tokenizer, **limits)


@pytest.mark.parametrize(("limits", "named"), BAD_FOR_THE_MODEL)
def test_what_the_model_cannot_do_is_refused_before_its_weights_are_loaded(
    tmp_path, monkeypatch, tiny_model, byte_tokenizer, limits, named
):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(llm_module, "resolve_model", lambda model: model)
    monkeypatch.setattr(llm_module, "load_model", lambda *args: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidArgumentError, match=named):
        LLM(tmp_path, device="cpu", **limits)
    with pytest.raises(InvalidArgumentError, match=named):
        LLM.from_loaded(tiny_model, byte_tokenizer, **limits)


def test_a_cache_must_hold_two_tokens_and_what_max_model_len_asks_for(tiny_model, byte_tokenizer):
    size = tiny_model.config.kv_bytes_per_token(4)
    with pytest.raises(InvalidArgumentError, match=f"^kv_cache_memory_bytes={2 * size - 1} is not enough"):
        LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=2 * size - 1)
    assert LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=2 * size).engine.max_model_len == 2
    with pytest.raises(InvalidArgumentError, match="max_model_len=60 does not fit"):
        LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=50 * size, max_model_len=60)


def test_numpy_numbers_are_numbers(tiny_model, byte_tokenizer):
    limits = {"max_model_len": np.int64(64), "max_num_seqs": np.int32(2), "gpu_memory_utilization": np.float64(0.5)}
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, seed=np.int64(3), **limits)
    assert (llm.engine.max_model_len, llm.engine.kv.num_slots) == (64, 128)


def test_context_follows_the_cache(tiny_model, byte_tokenizer):
    size = tiny_model.config.kv_bytes_per_token(4)
    for slots, expected in ((50, 50), (500, 128)):
        llm = LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=slots * size)
        assert llm.engine.max_model_len == expected


def test_default_cache_is_never_larger_than_what_can_be_used(tiny_model, byte_tokenizer):
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, max_num_seqs=3)
    assert llm.engine.kv.num_slots == 3 * 128


def test_loading_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path)
    with pytest.raises(InvalidArgumentError, match="enforce_eager"):
        LLM(tmp_path, enforce_eager=False)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        LLM(tmp_path, dtype="int8")
    with pytest.raises(InvalidArgumentError, match="device"):
        LLM(tmp_path, device="tpu")
    with pytest.raises(TypeError, match="swap_space"):
        LLM(tmp_path, swap_space=4)


@pytest.mark.parametrize("size", [2**50, 2**70, 10**30, 10**5000], ids=["2**50", "2**70", "10**30", "10**5000"])
def test_a_cache_that_no_machine_has_room_for(tiny_model, byte_tokenizer, size):
    with pytest.raises(InvalidArgumentError, match=r"^kv_cache_memory_bytes=.* does not fit: ") as caught:
        LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=size)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("token_id", [259, 999_999, -1])
def test_an_end_of_text_that_the_model_does_not_have(tiny_model, byte_tokenizer, monkeypatch, token_id):
    monkeypatch.setattr(type(byte_tokenizer), "stop_token_ids", (256, token_id))
    with pytest.raises(ModelLoadError, match=f"end-of-text id {token_id} "):
        LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=2**20)
