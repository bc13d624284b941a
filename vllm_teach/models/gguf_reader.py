"""Reads a Llama-family GGUF file as what it was before: a Hugging Face config, tensors by their names, a tokenizer.

GGUF is llama.cpp's one-file format: key-value metadata, then tensors in quantised blocks (Q4_1: 32 weights share a
scale and a minimum). `GGUFModel` keeps the file memory-mapped and dequantises one tensor at a time.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from vllm_teach.errors import ModelLoadError
from vllm_teach.models import gguf_tokenizer

# GGUF architecture -> (Hugging Face model_type, architecture class).
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Not a weight: the per-frequency divisors of Llama 3's RoPE scaling, from which `_rope_scaling` finds its parameters.
_ROPE_FREQS = "rope_freqs.weight"


class GGUFModel:
    """One GGUF file of a Llama-family model, opened for reading.

    Attributes: `path`; `metadata` (every key-value pair); `architecture` ("llama", "qwen2" or "qwen3"). Raises
    ModelLoadError when the file is no GGUF file, is damaged, or holds an architecture the package cannot run.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(
                f"{self.path} cannot be read as a GGUF file ({error}): download or convert it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{self.path} holds the architecture {self.architecture!r} and the readable ones are "
                f"{', '.join(_ARCHITECTURES)}: choose a model of one of these."
            )
        if self._get("expert_count", 0):
            raise ModelLoadError(f"{self.path} is a mixture of experts, which the decoder lacks: choose a dense model.")

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of the model."""
        model_type, architecture = _ARCHITECTURES[self.architecture]
        window = self._get("attention.sliding_window", None)
        if self.architecture == "llama" and window:
            model_type, architecture = "mistral", "MistralForCausalLM"
        vocab_size, hidden_size = self._tensor("token_embd.weight").data.shape[0], self._get("embedding_length")
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": int(vocab_size),
            "hidden_size": hidden_size,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": self._q_heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": _shortest(self._get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._get("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        if model_type in ("llama", "qwen3"):
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if model_type == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._tensors
        if model_type == "mistral":
            config["sliding_window"] = window
        return config

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer (see `gguf_tokenizer.build_tokenizer`)."""
        return gguf_tokenizer.build_tokenizer(self.metadata)

    def tensor_names(self) -> dict[str, str]:
        """Return {Hugging Face name: GGUF name} for every weight, in the file's order."""
        return {self._hf_name(name): name for name in self._tensors if name != _ROPE_FREQS}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), one dequantised tensor at a time."""
        for hf_name, name in self.tensor_names().items():
            yield hf_name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """Return the GGUF tensor `name` dequantised to float32, its rows in Hugging Face's order."""
        tensor = self._tensor(name)
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} of type {tensor.tensor_type.name} cannot be dequantised ({error}): "
                "choose another quantisation of the model."
            ) from error
        values = torch.from_numpy(np.array(array, dtype=np.float32))
        if self.architecture == "llama" and ".attn_q." in name:
            values = unpermute(values, self._q_heads)
        if self.architecture == "llama" and ".attn_k." in name:
            values = unpermute(values, self._kv_heads)
        return values

    def storage_dtype(self) -> torch.dtype:
        """Return the dtype that keeps the weights: the file's own where it is a plain float, else bfloat16."""
        types = {tensor.tensor_type.name for tensor in self._tensors.values() if tensor.data.ndim > 1}
        exact = {"F32": torch.float32, "F16": torch.float16}
        return exact[types.pop()] if len(types) == 1 and types <= exact.keys() else torch.bfloat16

    @property
    def _q_heads(self) -> int:
        return self._get("attention.head_count")

    @property
    def _kv_heads(self) -> int:
        return self._get("attention.head_count_kv", self._q_heads)

    @property
    def _head_dim(self) -> int:
        head_dim = self._get("attention.key_length", self._get("embedding_length") // self._q_heads)
        rotated = self._get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelLoadError(
                f"{self.path} rotates {rotated} of {head_dim} head dimensions and the decoder rotates all: "
                "choose another model."
            )
        return head_dim

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": _shortest(self._get("rope.scaling.factor"))}
        if kind != "none":
            raise ModelLoadError(
                f"{self.path} scales RoPE by {kind!r} and not as 'linear' or Llama 3 do: choose another model."
            )
        if _ROPE_FREQS not in self._tensors:
            return None
        divisors = self.read(_ROPE_FREQS).double()
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = llama3_divisors(self._head_dim, float(self._get("rope.freq_base", 10000.0)), scaling)
        if not torch.allclose(divisors, expected, rtol=1e-3):
            raise ModelLoadError(f"{self.path}: {_ROPE_FREQS} is not Llama 3's RoPE scaling: choose another model.")
        return scaling

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP_LEVEL:
            return f"{_TOP_LEVEL[stem]}.{kind}"
        prefix, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if prefix == "blk" and layer.isdigit() and part in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[part]}.{kind}"
        raise ModelLoadError(
            f"{self.path}: tensor {name} is not one of a {self.architecture} decoder's: choose another model."
        )

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelLoadError(f"{self.path}: tensor {name} is missing: download or convert the file again.")
        return self._tensors[name]

    def _get(self, key: str, *default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        if full in self.metadata:
            return self.metadata[full]
        if default:
            return default[0]
        raise ModelLoadError(f"{self.path}: metadata {full} is missing: download or convert the file again.")


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the output rows of q and k (`LlamaModel.permute` in its convert script).

    Llama rotates the pair (i, i + head_dim/2) in Hugging Face's layout and (2i, 2i + 1) in GGUF's, so GGUF stores each
    head's rows interleaved. `rows`: [heads * head_dim, ...], returned in the same shape.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def llama3_divisors(head_dim: int, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Return by what Llama 3.1's RoPE scaling divides each of the head_dim/2 frequencies (float64)."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _shortest(value: float) -> float:
    """Return the float64 with the fewest digits that is `value` in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
