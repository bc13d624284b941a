"""A model written as GGUF is the same model when it is read back, and what cannot be is refused."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from vllm_teach.errors import ModelLoadError
from vllm_teach.models import gguf_tokenizer
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.gguf_reader import GGUFModel, llama3_divisors
from vllm_teach.models.gguf_writer import write_gguf


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    """The reader asks the tokenizer, which such a file has not, for the special tokens alone."""
    monkeypatch.setattr(gguf_tokenizer, "special_token_id", lambda fields, name: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", False)])
def test_weights_and_shape_come_back(family, tied, dtype, tmp_path, tiny_hf):
    original = tiny_hf(family, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", dtype)
    model = GGUFModel(tmp_path / "m.gguf")
    state = original.state_dict()
    if tied:
        del state["lm_head.weight"]
    assert set(model.tensor_names()) == set(state)
    for name, stored in model.tensor_names().items():
        wanted = state[name] if state[name].dim() == 1 else state[name].to(dtype).float()
        assert torch.equal(model.read(stored), wanted), name
    written = ModelConfig.from_hf(json.loads((tmp_path / "model" / "config.json").read_text()))
    assert ModelConfig.from_hf(model.config()) == written
    assert model.storage_dtype() is dtype


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_same_weights(family, tied, tmp_path, tiny_hf):
    """An independent reader: it has its own names, its own order of q's and k's rows."""
    original = tiny_hf(family, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    read = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=original)
    state = original.state_dict()
    if tied:
        del state["lm_head.weight"]
    assert read["config"]["tie_word_embeddings"] is tied
    assert set(read["tensors"]) == set(state)
    for name, weight in state.items():
        assert torch.equal(read["tensors"][name], weight), name


def test_the_frequencies_of_old_checkpoints_are_left_out(tmp_path, tiny_hf):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(weights, file, {"format": "pt"})
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    assert not [tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "rot" in tensor.name]


def test_a_tensor_that_llama_cpp_does_not_know_is_named(tmp_path, tiny_hf):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.extra.weight": torch.ones(8)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has no 'model\.layers\.0\.self_attn\.extra\.weight'; use another model"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)


def test_a_full_disk_leaves_no_file_open(tmp_path, tiny_hf, monkeypatch):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    files = []

    def write(self: gguf.GGUFWriter) -> None:
        files.extend(self.fout)
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", write)
    with pytest.raises(OSError, match="No space left"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    assert [file.closed for file in files] == [True]


def test_the_file_has_a_vocabulary_size_and_no_tokenizer(tmp_path, tiny_hf):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert fields["tokenizer.ggml.model"] == "none"
    assert fields["llama.vocab_size"] == json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]


def test_llama_3_scaling_is_written_as_divisors(tmp_path, tiny_hf):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tiny_hf("llama", rope_parameters={"rope_theta": 5e5, **scaling}).save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    model = GGUFModel(tmp_path / "m.gguf")
    assert model.config()["rope_scaling"] == scaling
    assert torch.equal(model.read("rope_freqs.weight"), llama3_divisors(16, 5e5, scaling).float())


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("mistral", {}, "is a MistralForCausalLM"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}, "scaling 'linear'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "has sliding windows"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(family, more, words, tmp_path, tiny_hf):
    tiny_hf(family, **more).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=f"cannot be written as GGUF: it .*{words}"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
    assert not (tmp_path / "m.gguf").exists()


def test_quantised_weights_are_refused(tmp_path, tiny_hf):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    section = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
    with pytest.raises(ModelLoadError, match="has quantised weights"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf", torch.float32)
