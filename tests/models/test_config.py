import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.config import ModelConfig

# A config.json as transformers 4 wrote it for Llama 3.2, sizes reduced.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_llama3_of_transformers_4():
    config = ModelConfig.from_hf(LLAMA3)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "llama3"
    assert config.rope_scaling["factor"] == 32.0
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.dtype_name == "bfloat16"
    assert config.tie_word_embeddings
    assert config.window(0) is None
    # 2 (K and V) x 16 layers x 8 heads x 64 channels x 2 bytes.
    assert config.kv_bytes_per_token(2) == 32768


def test_transformers_5_rope_parameters_say_the_same_as_transformers_4_keys():
    new = {key: value for key, value in LLAMA3.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new["rope_parameters"] = {**LLAMA3["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA3)


@pytest.mark.parametrize("cls", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_model_type_names_the_architecture_where_config_does_not(cls):
    values = cls().to_dict()
    assert values["architectures"] is None
    assert ModelConfig.from_hf(values).architecture == cls.__name__.replace("Config", "ForCausalLM")


@pytest.mark.parametrize(
    ("cls", "qkv_bias", "out_bias", "qk_norm"),
    [(LlamaConfig, False, False, False), (Qwen2Config, True, False, False), (Qwen3Config, False, False, True)],
)
def test_what_the_architecture_implies(cls, qkv_bias, out_bias, qk_norm):
    config = ModelConfig.from_hf(cls().to_dict())
    assert (config.attention_bias, config.attention_out_bias, config.qk_norm) == (qkv_bias, out_bias, qk_norm)


def test_mistral_slides_in_all_layers_unless_the_window_is_null():
    assert ModelConfig.from_hf(MistralConfig(num_hidden_layers=3).to_dict()).sliding_layers == (True,) * 3
    silent = {key: value for key, value in MistralConfig().to_dict().items() if key != "sliding_window"}
    assert ModelConfig.from_hf(silent).window(0) == 4096
    assert ModelConfig.from_hf({**silent, "sliding_window": None}).window(0) is None


def test_qwen_slides_from_max_window_layers_on_and_only_if_told():
    values = Qwen2Config(num_hidden_layers=4, sliding_window=64, max_window_layers=3, use_sliding_window=True).to_dict()
    config = ModelConfig.from_hf(values)
    assert [config.window(layer) for layer in range(4)] == [None, None, None, 64]
    del values["layer_types"]
    assert ModelConfig.from_hf(values) == config
    assert ModelConfig.from_hf({**values, "use_sliding_window": False}).window(3) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(change, named):
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_hf({**LLAMA3, **change})


def test_refuses_unknown_layer_types():
    values = Qwen2Config(num_hidden_layers=2, sliding_window=64, use_sliding_window=True).to_dict()
    with pytest.raises(ModelLoadError, match="chunked_attention"):
        ModelConfig.from_hf({**values, "layer_types": ["full_attention", "chunked_attention"]})


def test_silent_tie_and_missing_architecture():
    config = {key: value for key, value in LLAMA3.items() if key != "tie_word_embeddings"}
    assert not ModelConfig.from_hf(config).tie_word_embeddings
    with pytest.raises(ModelLoadError, match="architecture"):
        ModelConfig.from_hf({})
