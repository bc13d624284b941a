"""A model with sliding windows gets them from the attention backend that was asked for, or no engine at all."""

import json

import pytest
from transformers import MistralConfig

from vllm_teach import LLM, SamplingParams, counters
from vllm_teach.attention.patterns import LocalWindow
from vllm_teach.backends import tiled
from vllm_teach.engine import llm as llm_module
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder

CONFIG = MistralConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    sliding_window=7,
).to_dict() | {"architectures": ["MistralForCausalLM"]}
REFUSED = r"^attention_backend='tiled' is not usable here \(No windows\.\): use 'sdpa'\.$"


@pytest.fixture(scope="module")
def sliding_model() -> Decoder:
    model = Decoder(ModelConfig.from_hf(CONFIG)).init_random(seed=1)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(20.0)  # otherwise all tokens are about equally likely
    return model


def test_a_backend_without_windows_is_refused_before_the_weights_are_loaded(
    tmp_path, monkeypatch, sliding_model, byte_tokenizer
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(llm_module, "resolve_model", lambda model: model)
    monkeypatch.setattr(llm_module, "load_model", lambda *args: pytest.fail("the weights were loaded"))
    monkeypatch.setattr(tiled, "supports", lambda spec: "No windows." if spec.pattern == LocalWindow(6, 0) else None)
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        LLM(tmp_path, device="cpu", attention_backend="tiled")
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        LLM.from_loaded(sliding_model, byte_tokenizer, attention_backend="tiled", max_model_len=8)


def test_the_backend_asked_for_computes_the_windows(sliding_model, byte_tokenizer):
    tokens, work = {}, {}
    for name in ("sdpa", "naive", "tiled", "memory_efficient"):
        llm = LLM.from_loaded(sliding_model, byte_tokenizer, attention_backend=name, kv_cache_memory_bytes=100_000)
        with counters.count() as tally:
            (output,) = llm.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        tokens[name], work[name] = output.outputs[0].token_ids, tally.flops
    assert all(found == tokens["sdpa"] for found in tokens.values())
    assert work["naive"] > work["sdpa"] == 0  # SDPA's loops cannot be seen, the naive one reports its own


def test_a_window_as_long_as_the_context_changes_nothing(sliding_model, byte_tokenizer):
    outputs = []
    for window in (7, None):
        config = ModelConfig.from_hf(CONFIG | {"sliding_window": window})
        model = Decoder(config)
        model.load_state_dict(sliding_model.state_dict(), assign=True)
        llm = LLM.from_loaded(model, byte_tokenizer, max_model_len=7, kv_cache_memory_bytes=100_000)
        outputs.append(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
