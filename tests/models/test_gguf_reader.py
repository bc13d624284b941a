import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from vllm_teach.errors import ModelLoadError
from vllm_teach.models import convert
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.fields import Fields
from vllm_teach.models.gguf_reader import GGUFModel, llama3_divisors, unpermute

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_unquantised_weights_come_back_exactly_under_their_names(family, tied, tmp_path, tiny_hf, write_gguf):
    original = tiny_hf(family, tie_word_embeddings=tied)
    model = GGUFModel(write_gguf(tmp_path / "m.gguf", original, family))
    read = {hf_name: model.read(name) for hf_name, name in model.tensor_names().items()}
    expected = original.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert read.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(read[name], weight), name
    assert model.storage_dtype() == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_config_says_what_the_original_said(family, tmp_path, tiny_hf, write_gguf):
    rope = {"rope_type": "default", "rope_theta": 1e5}
    original = tiny_hf(family, rms_norm_eps=1e-5, rope_parameters=rope)
    config = GGUFModel(write_gguf(tmp_path / "m.gguf", original, family)).config()
    read = ModelConfig.from_hf(config)
    assert read == ModelConfig.from_hf({**original.config.to_dict(), "architectures": [type(original).__name__]})
    assert read.rope_theta == 1e5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def edited(path: Path, changes: dict[str, object]) -> GGUFModel:
    """The model of `path` as if its metadata said something else; None takes an entry away."""
    model = GGUFModel(path)
    model.fields = Fields({**model.fields.values, **changes}, str(path))
    return model


def test_a_silent_file_has_one_key_value_head_per_query_head(tiny_gguf):
    assert edited(tiny_gguf, {"llama.attention.head_count_kv": None}).config()["num_key_value_heads"] == 4


ENTRIES = [
    "general.architecture",
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.attention.sliding_window",
    "llama.rope.freq_base",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.rope.dimension_count",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_damaged_entry_is_refused_or_does_no_harm(entry, tiny_gguf, tmp_path, monkeypatch):
    """Never another exception than ModelLoadError, which names file and entry or the tensor that no longer fits."""
    messages = []
    for value in ["x", -1, 0, 3, 2**40, [], ["x", "y z"], [3], {}, None, True, False, math.inf, math.nan]:
        scaled = {"llama.rope.scaling.type": "linear"} if entry.endswith("scaling.factor") else {}
        model = edited(tiny_gguf, {**scaled, entry: value})
        monkeypatch.setattr(convert, "GGUFModel", lambda path, model=model: model)
        try:
            convert.convert_gguf(tiny_gguf, tmp_path, progress=False)
        except ModelLoadError as error:
            messages.append(str(error))
    # The architecture is checked when the file is opened, which is over by then.
    assert messages or entry == "general.architecture"
    named = rf"{re.escape(str(tiny_gguf))}.*({re.escape(entry)}|tensor|head dimensions|_token_id).*\."
    assert [message for message in messages if not re.fullmatch(named, message)] == []


@pytest.mark.parametrize("quantisation", [Q4_1, Q8_0])
def test_quantised_weights_are_within_half_a_step(quantisation, tmp_path, tiny_hf, write_gguf):
    original = tiny_hf("llama")
    model = GGUFModel(write_gguf(tmp_path / "m.gguf", original, quantise=quantisation))
    assert model.storage_dtype() == torch.bfloat16
    for name, gguf_name in model.tensor_names().items():
        read = model.read(gguf_name)
        weight = original.state_dict()[name]
        if weight.ndim == 1:
            assert torch.equal(read, weight)
            continue
        blocks = weight.reshape(-1, 32)
        step = (blocks.amax(1) - blocks.amin(1)) / 15 if quantisation == Q4_1 else blocks.abs().amax(1) / 127
        # Half a step, and the float16 rounding of scale and minimum.
        limit = 0.5 * step + 2e-3 * blocks.abs().amax(1)
        assert ((read.reshape(-1, 32) - blocks).abs().amax(1) <= limit).all(), name


def test_unpermute_is_the_inverse_of_llama_cpps_permute():
    rows = torch.arange(12 * 3.0).reshape(12, 3)
    permuted = rows.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert not torch.equal(permuted, rows)
    assert torch.equal(unpermute(permuted, heads=2), rows)
    assert torch.equal(unpermute(permuted[:, 0], heads=2), rows[:, 0])  # biases too


def test_llama_3_scaling_is_found_again(tmp_path, tiny_hf, write_gguf):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny_hf("llama", rope_parameters={"rope_theta": 5e5, **scaling})
    divisors = llama3_divisors(16, 5e5, scaling)
    # The oracle: transformers' own scaled frequencies.
    plain = 5e5 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert torch.allclose(plain / divisors, original.model.rotary_emb.inv_freq.double(), rtol=1e-6)

    tensors = {"rope_freqs.weight": divisors.float().numpy()}
    model = GGUFModel(write_gguf(tmp_path / "m.gguf", original, extra_tensors=tensors))
    assert model.config()["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in model.tensor_names().values()

    tensors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(ModelLoadError, match="not Llama 3's RoPE scaling"):
        GGUFModel(write_gguf(tmp_path / "other.gguf", original, extra_tensors=tensors)).config()


def test_linear_scaling_and_a_window_are_kept(tmp_path, tiny_hf, write_gguf):
    fields = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 9,
    }
    config = GGUFModel(write_gguf(tmp_path / "m.gguf", tiny_hf("llama"), fields=fields)).config()
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"has llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 head dimensions"),
        ({"llama.expert_count": 8}, "mixture of experts"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(fields, message, tmp_path, tiny_hf, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", tiny_hf("llama"), fields=fields)
    with pytest.raises(ModelLoadError, match=message):
        GGUFModel(path).config()


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'bert'.*llama, qwen2, qwen3"):
        GGUFModel(tmp_path / "m.gguf")


def test_a_tensor_of_another_kind_of_decoder_is_refused(tmp_path, tiny_hf, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", tiny_hf("llama"), extra_tensors={"blk.0.ssm_a": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ssm_a"):
        GGUFModel(path).tensor_names()


def test_a_missing_embedding_is_named(tmp_path, tiny_hf, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", tiny_hf("llama"), drop=("token_embd.weight",))
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight is missing"):
        GGUFModel(path).config()


@pytest.mark.parametrize("keep", [0, 3, 100, 4000, 50_000])
def test_a_cut_file_is_refused(keep, tmp_path, tiny_gguf):
    content = tiny_gguf.read_bytes()
    assert len(content) > 50_000
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:keep])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf cannot be read as a GGUF file"):
        GGUFModel(cut)


def test_a_file_of_another_format_is_refused(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelLoadError, match="cannot be read as a GGUF file"):
        GGUFModel(other)
