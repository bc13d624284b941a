"""An engine's limits: each is refused by its own name, before the weights are loaded."""

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest
import torch

from vllm_teach import LLM, SamplingParams
from vllm_teach.attention.patterns import BlockSparsePattern, LocalWindow
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
    ({"block_size": 0}, "block_size=0"),
    ({"block_size": 16.0}, "block_size=16.0"),
    ({"num_kv_blocks": 0}, "num_kv_blocks=0"),
    ({"num_kv_blocks": True}, "num_kv_blocks=True"),
    ({"swap_space": -1}, "swap_space=-1"),
    ({"swap_space": "4"}, "swap_space='4'"),
    ({"swap_space": math.inf}, "swap_space=inf"),
    ({"swap_space": math.nan}, "swap_space=nan"),
    ({"swap_space": 1e308}, r"swap_space=1e\+308"),
    ({"seed": 2**64}, "seed=18446744073709551616"),
    ({"preemption_mode": "swap"}, "swap_space=0"),
    ({"swap_file": "swap.bin"}, "swap_space=0"),
    ({"swap_file": 5, "swap_space": 1}, "swap_file=5"),
    ({"preemption_mode": "kill"}, "preemption_mode='kill'"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching=1"),
    ({"enable_chunked_prefill": None}, "enable_chunked_prefill=None"),
    ({"prefix_cache": "trie"}, "prefix_cache='trie'"),
    ({"eviction_policy": "random"}, "eviction_policy='random'"),
    ({"eviction_policy": ["lru"]}, r"eviction_policy=\['lru'\]"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype=torch.int8"),
    ({"kv_placement": "anywhere"}, "kv_placement='anywhere'"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
    ({"batching": "dynamic"}, "batching='dynamic'"),
    ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
    ({"watermark": 1.0}, "watermark=1.0"),
    ({"watermark": -0.1}, "watermark=-0.1"),
    ({"watermark": math.nan}, "watermark=nan"),
    ({"long_prefill_token_threshold": 8, "enable_chunked_prefill": False}, "long_prefill_token_threshold=8"),
    ({"max_events": 0}, "max_events=0"),
    ({"target_inter_token_latency": 0}, "target_inter_token_latency=0"),
    ({"target_inter_token_latency": math.inf}, "target_inter_token_latency=inf"),
    ({"target_inter_token_latency": "50ms"}, "target_inter_token_latency='50ms'"),
]
BAD_FOR_THE_MODEL = [
    ({"max_model_len": 4096}, "max_model_len=4096"),
    ({"max_model_len": 129}, "max_model_len=129"),
    ({"attention_backend": "nobody"}, "nobody"),
    ({"attention_backend": "flash_attn"}, "attention_backend='flash_attn'"),
    ({"attention_pattern": "local"}, "attention_pattern='local'"),
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
    for block_size, least in ((1, 2), (2, 2), (5, 5)):

        def start(size, block_size=block_size, **limits):
            limits |= {"kv_cache_memory_bytes": size, "block_size": block_size}
            return LLM.from_loaded(tiny_model, byte_tokenizer, **limits)

        with pytest.raises(InvalidArgumentError, match=f"^kv_cache_memory_bytes={least * size - 1} is not enough"):
            start(least * size - 1)
        assert start(least * size).engine.max_model_len == least
        with pytest.raises(InvalidArgumentError, match="max_model_len=60 does not fit"):
            start(50 * size, max_model_len=60)
    with pytest.raises(InvalidArgumentError, match=r"^num_kv_blocks=1 is not enough"):
        LLM.from_loaded(tiny_model, byte_tokenizer, num_kv_blocks=1, block_size=1)


def test_bytes_become_whole_blocks(tiny_model, byte_tokenizer, tmp_path):
    """A block has K and V of 16 tokens over all layers; what is left of the bytes is not used."""
    token_bytes = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head_dim, float32
    limits = {"kv_cache_memory_bytes": 7 * 16 * token_bytes + 5, "swap_space": (3.5 * 16 * token_bytes) / 2**30}
    engine = LLM.from_loaded(tiny_model, byte_tokenizer, **limits, swap_file=tmp_path / "swap").engine
    assert (engine.kv.num_blocks, engine.kv.num_host_blocks, engine.kv.block_size) == (7, 3, 16)
    storage = engine.runner.storage
    assert storage.keys.nbytes + storage.values.nbytes == (7 + 1) * 16 * token_bytes  # one more, which stays zero
    assert (tmp_path / "swap").stat().st_size == 3 * 16 * token_bytes
    with pytest.raises(InvalidArgumentError, match=r"^swap_space=1e-09 is less than one block"):
        LLM.from_loaded(tiny_model, byte_tokenizer, num_kv_blocks=9, swap_space=1e-9)
    with pytest.raises(InvalidArgumentError, match=r"^swap_file="):
        LLM.from_loaded(tiny_model, byte_tokenizer, **limits, swap_file=tmp_path / "absent" / "swap")


def test_numpy_numbers_are_numbers(tiny_model, byte_tokenizer):
    limits = {"max_model_len": np.int64(64), "max_num_seqs": np.int32(2), "gpu_memory_utilization": np.float64(0.5)}
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, seed=np.int64(3), **limits)
    assert (llm.engine.max_model_len, llm.engine.kv.num_blocks) == (64, 2 * 64 // 16)


def test_context_follows_the_cache(tiny_model, byte_tokenizer):
    size = tiny_model.config.kv_bytes_per_token(4)
    for slots, expected in ((50, 48), (500, 128)):  # whole blocks of 16
        llm = LLM.from_loaded(tiny_model, byte_tokenizer, kv_cache_memory_bytes=slots * size)
        assert llm.engine.max_model_len == expected


def test_default_cache_is_never_larger_than_what_can_be_used(tiny_model, byte_tokenizer):
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, max_num_seqs=3)
    assert llm.engine.kv.num_blocks == 3 * 128 // 16


def test_loading_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path)
    with pytest.raises(InvalidArgumentError, match="enforce_eager"):
        LLM(tmp_path, enforce_eager=False)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        LLM(tmp_path, dtype="int8")
    with pytest.raises(InvalidArgumentError, match="device"):
        LLM(tmp_path, device="tpu")
    with pytest.raises(TypeError, match="speculative_model"):
        LLM(tmp_path, speculative_model="tiny")


def test_llm_takes_every_field_of_the_config_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    parameters = {name: each.default for name, each in inspect.signature(LLM.__init__).parameters.items()}
    assert fields.items() <= parameters.items()


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


@pytest.mark.parametrize("combine", [lambda each: each, lambda each: each & LocalWindow(9)])
def test_a_pattern_shorter_than_the_context_is_refused(make_llm, combine):
    """Else the request that first comes to its end would take all requests of that step with it."""
    pattern = combine(BlockSparsePattern(torch.ones(4, 4, dtype=torch.bool), 4))
    with pytest.raises(InvalidArgumentError, match=r"^attention_pattern=.*max_model_len=17 \(.*\): make them fit\.$"):
        make_llm(attention_pattern=pattern, max_model_len=17)
    engine = make_llm(attention_pattern=pattern, max_model_len=16).engine
    engine.add_request([1] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert (output.error, len(output.outputs[0].token_ids)) == (None, 6)
