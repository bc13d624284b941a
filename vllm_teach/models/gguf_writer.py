"""Writes the weights of a Hugging Face directory as a GGUF file, so that llama.cpp computes the same model.

The file holds no tokenizer: llama.cpp then takes and returns token ids alone, which is what a comparison needs.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import torch

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.gguf_reader import llama3_divisors, permute
from vllm_teach.models.load import load_config
from vllm_teach.models.weights import Checkpoint
from vllm_teach.quantization.quantization_config import read_config

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write_gguf(folder: Path, file: Path, dtype: torch.dtype) -> None:
    """Write the model in `folder` to `file`, its matrices in `dtype`: float32, float16 or bfloat16.

    Norms and biases are float32, as llama.cpp wants them. The whole model is held in memory meanwhile. Raises
    ModelLoadError for a model that llama.cpp would compute differently: quantised weights, sliding windows, a linear
    RoPE scaling, another family, a tensor that this family has not in llama.cpp. OSError, as of a full disk, may leave
    a part of the file.
    """
    config = load_config(folder)
    _refuse_others(folder, config)
    with closing(gguf.GGUFWriter(file, _FAMILIES[config.architecture])) as writer:
        _add_shape(writer, config)
        _add_weights(writer, folder, config, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add_weights(writer: gguf.GGUFWriter, folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    family = _FAMILIES[config.architecture]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_layers)
    checkpoint = Checkpoint(folder)
    for name in checkpoint.files:
        # RoPE's frequencies, which old checkpoints store, follow from the config, as `load_model` has it, too.
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if (its_name := names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise ModelLoadError(
                f"{folder} cannot be written as GGUF: llama.cpp's {family} has no {name!r}; use another model."
            )
        weight = checkpoint.copy(name, torch.float32, "cpu")
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = permute(weight, config.num_q_heads if ".q_proj." in name else config.num_kv_heads)
        kind = _TYPES[dtype] if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(weight.numpy(), kind)
        writer.add_tensor(its_name, packed, raw_dtype=kind)
    if config.rope_scaling is not None:
        divisors = llama3_divisors(config.head_dim, config.rope_theta, config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())


def _refuse_others(folder: Path, config: ModelConfig) -> None:
    problem = None
    if config.architecture not in _FAMILIES:
        problem = f"is a {config.architecture}, and {', '.join(_FAMILIES)} can be written"
    elif read_config(folder) is not None:
        problem = "has quantised weights, and full-precision ones can be written"
    elif any(config.sliding_layers):
        problem = "has sliding windows, which are not written"
    elif config.rope_scaling is not None and config.rope_scaling["rope_type"] != "llama3":
        problem = f"has the RoPE scaling {config.rope_scaling['rope_type']!r}, and Llama 3's alone is written"
    if problem is not None:
        raise ModelLoadError(f"{folder} cannot be written as GGUF: it {problem}; use another model.")


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("none")
