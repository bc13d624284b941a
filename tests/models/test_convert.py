import json

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from vllm_teach.models.convert import convert_gguf
from vllm_teach.models.gguf_reader import GGUFModel
from vllm_teach.models.load import load_model


def test_weights_are_the_dequantised_ones_in_bfloat16(tmp_path, tiny_gguf):
    convert_gguf(tiny_gguf, tmp_path, progress=False)
    model = GGUFModel(tiny_gguf)
    expected = {hf_name: model.read(name) for hf_name, name in model.tensor_names().items()}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        assert set(weights.keys()) == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(weights.get_tensor(name), tensor.bfloat16()), name


def test_transformers_reads_the_directory(tmp_path, tiny_gguf):
    convert_gguf(tiny_gguf, tmp_path, progress=False)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == GGUFModel(tiny_gguf).fields.text("tokenizer.chat_template")
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_survive_the_way_through_gguf(family, tmp_path, tiny_hf, write_gguf):
    original = tiny_hf(family)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", original, family), folder, progress=False)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(original(tokens).logits, converted(tokens).logits)


def test_large_models_are_written_in_several_files(tmp_path, tiny_gguf):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, limit in ((whole, 2**30), (parts, 60_000)):
        folder.mkdir()
        convert_gguf(tiny_gguf, folder, progress=False, shard_bytes=limit)
    files = sorted(file.name for file in parts.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    one, several = load_model(whole), load_model(parts)
    assert index["metadata"]["total_size"] == 2 * one.num_parameters()
    for name, weight in one.named_parameters():
        assert torch.equal(weight, several.get_parameter(name)), name
    AutoModelForCausalLM.from_pretrained(parts)


def test_norms_beyond_float16_keep_their_values(tmp_path, tiny_hf, write_gguf):
    def converted(name: str, scale: float) -> dict[str, torch.Tensor]:
        model = tiny_hf("llama").requires_grad_(False)
        model.model.norm.weight.fill_(scale)
        path, folder = tmp_path / f"{name}.gguf", tmp_path / name
        folder.mkdir()
        convert_gguf(write_gguf(path, model, quantise=gguf.GGMLQuantizationType.F16), folder, progress=False)
        return load_file(folder / "model.safetensors")

    small, large = converted("small", 60_000.0), converted("large", 70_000.0)
    assert {weight.dtype for weight in small.values()} == {torch.float16}
    assert {weight.dtype for weight in large.values()} == {torch.float32}
    assert large["model.norm.weight"].unique().tolist() == [70_000.0]
