import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from vllm_teach.errors import ModelLoadError, ModelNotFoundError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens, torch.arange(len(tokens)), full_causal("sdpa"))
    return model.logits(hidden)


def saved(model: PreTrainedModel, folder: Path, **how: object) -> Path:
    model.save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path, tiny_hf):
    family, overrides = CASES[case]
    reference = tiny_hf(family, attn_implementation="eager", **overrides)
    model = load_model(saved(reference, tmp_path), torch.float32)
    tokens = torch.randint(0, 320, (80,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert expected.std() > 0.1  # the comparison would notice something
    assert (logits(model, tokens) - expected).abs().max() <= 1e-4


def test_sharded_equals_single(tmp_path, tiny_hf):
    original = tiny_hf("llama")
    single = saved(original, tmp_path / "single")
    sharded = saved(original, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    several = load_model(sharded)
    for name, weight in load_model(single).named_parameters():
        assert torch.equal(several.get_parameter(name), weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_asked_dtype_and_the_model_is_for_inference(dtype, tmp_path, tiny_hf):
    original = tiny_hf("llama")
    model = load_model(saved(original, tmp_path), dtype)
    assert not model.training
    for name, weight in model.named_parameters():
        assert weight.dtype == dtype
        assert not weight.requires_grad
        assert torch.equal(weight, original.get_parameter(name).to(dtype)), name


def test_tied_models_have_no_output_matrix_of_their_own(tmp_path, tiny_hf):
    model = load_model(saved(tiny_hf("llama", tie_word_embeddings=True), tmp_path))
    assert "lm_head.weight" not in dict(model.named_parameters())
    hidden = torch.randn(3, 64)
    assert torch.equal(model.logits(hidden), hidden @ model.model.embed_tokens.weight.T)


@pytest.fixture
def broken(tmp_path: Path, tiny_hf: Callable) -> Callable[..., Path]:
    """make(change, **config) -> a saved Llama whose tensors `change` altered in place."""

    def make(change: Callable[[dict[str, torch.Tensor]], object], **config: object) -> Path:
        folder = saved(tiny_hf("llama", **config), tmp_path)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


NAME = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_tensor_is_named(broken):
    with pytest.raises(ModelLoadError, match=rf"tensor {NAME} is missing from "):
        load_model(broken(lambda tensors: tensors.pop(NAME)))


def test_a_wrong_shape_is_named(broken):
    with pytest.raises(ModelLoadError, match=rf"tensor {NAME} in .*model\.safetensors has shape \[3, 4\].*\[96, 64\]"):
        load_model(broken(lambda tensors: tensors.update({NAME: torch.ones(3, 4)})))


def test_the_first_unexpected_tensor_is_named(broken):
    extra = {f"model.extra{number}": torch.ones(1) for number in range(5)}
    with pytest.raises(ModelLoadError, match=r"tensor model\.extra0 in .*model\.safetensors has no place"):
        load_model(broken(lambda tensors: tensors.update(extra)))


def test_rope_frequencies_of_old_checkpoints_are_passed_over(broken):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = load_model(broken(lambda tensors: tensors.update({name: torch.ones(8)})))
    assert name not in model.state_dict()


def test_a_stored_copy_of_the_tied_matrix_is_passed_over_and_another_matrix_is_not(broken):
    embedding = "model.embed_tokens.weight"
    folder = broken(
        lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}), tie_word_embeddings=True
    )
    load_model(folder)
    folder = broken(
        lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1}), tie_word_embeddings=True
    )
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight in .* has no place"):
        load_model(folder)


def test_a_truncated_weight_file_is_named(tmp_path, tiny_hf):
    file = saved(tiny_hf("llama"), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or cut short") as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"model_type": "bert", "architectures": ["BertModel"]})])
def test_a_config_that_is_none(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(tmp_path / "config.json"))):
        load_model(tmp_path)


def test_a_damaged_entry_of_the_config_is_named_with_its_file(tmp_path, tiny_hf):
    file = saved(tiny_hf("llama"), tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": "x"}))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(str(file))} has rms_norm_eps = 'x'"):
        load_model(tmp_path)
