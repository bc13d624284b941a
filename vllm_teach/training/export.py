"""Writes a trained model as a Hugging Face directory, which the package and `transformers` both read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.training.tokenizer import END_OF_TEXT_ID, save_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def export_model(model: Decoder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, weights in `dtype`, tokenizer and generation settings into the existing `folder`."""
    from safetensors.torch import save_file

    weights = {name: weight.detach().to(dtype).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    write_json(folder / "config.json", {**hf_config(model.config), "torch_dtype": str(dtype).removeprefix("torch.")})
    write_json(folder / "generation_config.json", _SPECIAL)
    save_tokenizer(tokenizer, folder, model.config.max_position)


_SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the Hugging Face `config.json` of a plain Llama; `ModelConfig.from_hf` gives `config` back."""
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        **_SPECIAL,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON that ends with a line break."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
