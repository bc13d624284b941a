import re

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.rope import inverse_frequencies

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

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}
SILENT_ON = {"attention_bias", "mlp_bias"}
MISTRAL = {key: value for key, value in LLAMA.items() if key not in SILENT_ON} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 7,
}
QWEN2 = {
    **MISTRAL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "max_window_layers": 1,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True}
FAMILIES = {LlamaConfig: LLAMA, MistralConfig: MISTRAL, Qwen2Config: QWEN2, Qwen3Config: QWEN3}


def llama3(**changes):
    return {"rope_scaling": {**LLAMA3["rope_scaling"], **changes}}


def test_llama3_of_transformers_4():
    config = ModelConfig.from_hf(LLAMA3)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "llama3"
    assert config.rope_scaling["factor"] == 32.0
    assert config.tie_word_embeddings
    assert config.window(0) is None
    # 2 (K and V) x 16 layers x 8 heads x 64 channels x 2 bytes.
    assert config.kv_bytes_per_token(2) == 32768


def test_transformers_5_rope_parameters_say_the_same_as_transformers_4_keys():
    new = {key: value for key, value in LLAMA3.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new["rope_parameters"] = {**LLAMA3["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA3)


def completed(cls, values):
    """What transformers makes of `values`, its defaults filled in."""
    return ModelConfig.from_hf({**cls.from_dict(values).to_dict(), "architectures": values["architectures"]})


@pytest.mark.parametrize("cls", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_assumes(cls):
    values = FAMILIES[cls]
    assert ModelConfig.from_hf(values) == completed(cls, values)
    for key in values.keys() - {"architectures", "model_type"}:
        without = {other: value for other, value in values.items() if other != key}
        assert ModelConfig.from_hf(without) == completed(cls, without), key
    bare = {key: values[key] for key in ("architectures", "model_type")}
    assert ModelConfig.from_hf(bare) == completed(cls, bare)


@pytest.mark.parametrize("cls", FAMILIES)
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "sliding_window", "rope_scaling"])
def test_a_null_means_what_transformers_takes_it_for(cls, key):
    values = {**FAMILIES[cls], key: None}
    try:
        expected = completed(cls, values)
    except StrictDataclassFieldValidationError:
        return  # transformers refuses it
    assert ModelConfig.from_hf(values) == expected


def test_a_llama_has_no_window_whatever_its_config_says():
    told = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
    assert ModelConfig.from_hf({**LLAMA, **told}).window(0) is None


def test_of_two_rope_entries_the_older_counts_as_in_transformers():
    both = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}}
    assert ModelConfig.from_hf(both) == completed(LlamaConfig, both)


def test_llama3_scaling_starts_from_the_models_own_context_unless_told():
    key, scaling = "original_max_position_embeddings", LLAMA3["rope_scaling"]
    values = {**LLAMA, "rope_scaling": {name: value for name, value in scaling.items() if name != key}}
    for told in ({}, {key: 64}):
        config = ModelConfig.from_hf({**values, **told})
        assert config.rope_scaling is not None
        assert config.rope_scaling[key] == told.get(key, 512)
        assert config == completed(LlamaConfig, {**values, **told})


@pytest.mark.parametrize("cls", FAMILIES)
def test_a_damaged_value_is_refused_or_gives_a_sound_config(cls):
    """Each entry in turn becomes something else: ModelLoadError that names the file, or a model that can be built."""
    values = {
        **FAMILIES[cls],
        **llama3(),
        "rope_parameters": {},
        "partial_rotary_factor": 1.0,
        "layer_types": ["full_attention"] * 3,
    }
    rope = values["rope_scaling"]
    wrong = ["x", "", -1, 0, 1, 3, 2.5, 10**400, 2**40, [], [None], ["x"], {}, {"a": 1}, None, True, False]
    wrong += [1e400, -1e400, float("nan"), [[]] * 3]
    damaged = [{**values, key: value} for key in values for value in wrong]
    damaged += [{**values, "rope_scaling": {**rope, key: value}} for key in rope for value in wrong]
    messages = []
    for config in damaged:
        try:
            sound = ModelConfig.from_hf(config, "/m/config.json")
        except ModelLoadError as error:
            messages.append(str(error))
            continue
        assert 0 < sound.rms_norm_eps < float("inf")
        assert len(sound.sliding_layers) == sound.num_layers
        assert sound.num_q_heads % sound.num_kv_heads == sound.head_dim % 2 == 0
        assert inverse_frequencies(sound).isfinite().all()
        Decoder(sound)
    assert [message for message in messages if not re.fullmatch(r"/m/config\.json .*\.", message)] == []
    assert len(messages) > len(damaged) / 2


@pytest.mark.parametrize("cls", FAMILIES)
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
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 65538}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one per kind of layer"),
        ({"head_dim": 63}, "head_dim = 63 where an even number"),
        ({"hidden_size": 16, "head_dim": None}, "head_dim = 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"max_position_embeddings": 1}, "max_position_embeddings = 1 where a whole number from 2"),
        ({"rope_scaling": "llama3"}, "rope_scaling = 'llama3'"),
        ({"architectures": {"a": 1}}, "architectures = {'a': 1}"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"\(rope_scaling\) has factor = 0"),
        (llama3(original_max_position_embeddings="x"), "original_max_position_embeddings = 'x'"),
        (llama3(high_freq_factor=1.0), "high_freq_factor = 1.0"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(change, named):
    with pytest.raises(ModelLoadError, match=rf"^/m/config\.json .*{named}"):
        ModelConfig.from_hf({**LLAMA3, **change}, "/m/config.json")


def test_refuses_unknown_layer_types():
    values = Qwen2Config(num_hidden_layers=2, sliding_window=64, use_sliding_window=True).to_dict()
    with pytest.raises(ModelLoadError, match="chunked_attention"):
        ModelConfig.from_hf({**values, "layer_types": ["full_attention", "chunked_attention"]})


def test_silent_tie_and_missing_architecture():
    config = {key: value for key, value in LLAMA3.items() if key != "tie_word_embeddings"}
    assert not ModelConfig.from_hf(config).tie_word_embeddings
    with pytest.raises(ModelLoadError, match="architecture"):
        ModelConfig.from_hf({})
