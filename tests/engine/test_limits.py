"""An engine's limits: each is refused by its own name, before the weights are loaded."""

import pytest

from vllm_teach import LLM
from vllm_teach.errors import InvalidArgumentError, ModelNotFoundError


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 3}, "capacity_bytes"),
        ({"kv_cache_memory_bytes": -3}, "kv_cache_memory_bytes"),
        ({"attention_backend": "nobody"}, "nobody"),
        ({"attention_backend": "flash_attn"}, "flash_attn"),
        ({"max_model_len": 4096}, "max_model_len"),
    ],
)
def test_bad_limits(make_llm, limits, named):
    with pytest.raises(InvalidArgumentError, match=named):
        make_llm(**limits)


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
