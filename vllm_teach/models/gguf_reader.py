"""Reads a Llama-family GGUF file as what it was before: a Hugging Face config, tensors by their names, a tokenizer.

GGUF is llama.cpp's one-file format: key-value metadata, then tensors in quantised blocks (Q4_1: 32 weights share a
scale and a minimum). `GGUFModel` keeps the file memory-mapped and dequantises one tensor at a time.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from vllm_teach.errors import ModelLoadError
from vllm_teach.models import gguf_tokenizer
from vllm_teach.models.fields import Fields

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

    Attributes: `path`; `fields` (every key-value pair); `architecture` ("llama", "qwen2" or "qwen3"). Raises
    ModelLoadError when the file is no GGUF file, is damaged, or holds an architecture the package cannot run.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.fields = Fields({key: field.contents() for key, field in reader.fields.items()}, str(self.path))
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(
                f"{self.path} cannot be read as a GGUF file ({error}): download or convert it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.fields.text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{self.path} holds the architecture {self.architecture!r} and the readable ones are "
                f"{', '.join(_ARCHITECTURES)}: choose a model of one of these."
            )
        if self.fields.integer(self._key("expert_count"), 0, minimum=0):
            raise ModelLoadError(f"{self.path} is a mixture of experts, which the decoder lacks: choose a dense model.")

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of the model."""
        fields, key = self.fields, self._key
        model_type, architecture = _ARCHITECTURES[self.architecture]
        window = fields.integer(key("attention.sliding_window"), 0, minimum=0)
        if self.architecture == "llama" and window:
            model_type, architecture = "mistral", "MistralForCausalLM"
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": int(self._tensor("token_embd.weight").data.shape[0]),
            "hidden_size": fields.integer(key("embedding_length")),
            "intermediate_size": fields.integer(key("feed_forward_length")),
            "num_hidden_layers": fields.integer(key("block_count")),
            "num_attention_heads": self._q_heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": fields.integer(key("context_length"), minimum=2, maximum=2**31 - 1),
            "rms_norm_eps": _shortest(fields.number(key("attention.layer_norm_rms_epsilon"))),
            "rope_theta": _shortest(self._theta),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": gguf_tokenizer.special_token_id(fields, "bos"),
            "eos_token_id": gguf_tokenizer.special_token_id(fields, "eos"),
            "pad_token_id": gguf_tokenizer.special_token_id(fields, "padding"),
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
        return gguf_tokenizer.build_tokenizer(self.fields)

    def tensor_names(self) -> dict[str, str]:
        """Return {Hugging Face name: GGUF name} for every weight, in the file's order."""
        return {self._hf_name(name): name for name in self._tensors if name != _ROPE_FREQS}

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
            values = self._unpermuted(name, values, self._q_heads)
        if self.architecture == "llama" and ".attn_k." in name:
            values = self._unpermuted(name, values, self._kv_heads)
        return values

    def storage_dtype(self) -> torch.dtype:
        """Return the dtype that keeps the weights: the file's own where its matrices are plain floats, else bfloat16.

        GGUF keeps norms and biases in float32 beside float16 matrices; float32 for all where they pass float16's range.
        """
        types = {tensor.tensor_type.name for tensor in self._tensors.values() if tensor.data.ndim > 1}
        if types == {"F16"}:
            vectors = [name for name, tensor in self._tensors.items() if tensor.data.ndim == 1]
            fits = all(self.read(name).abs().max() <= torch.finfo(torch.float16).max for name in vectors)
            return torch.float16 if fits else torch.float32
        return torch.float32 if types == {"F32"} else torch.bfloat16

    @property
    def _q_heads(self) -> int:
        return self.fields.integer(self._key("attention.head_count"))

    @property
    def _kv_heads(self) -> int:
        return self.fields.integer(self._key("attention.head_count_kv"), self._q_heads)

    @property
    def _head_dim(self) -> int:
        default = self.fields.integer(self._key("embedding_length")) // self._q_heads
        head_dim = self.fields.integer(self._key("attention.key_length"), default)
        rotated = self.fields.integer(self._key("rope.dimension_count"), head_dim)
        if rotated != head_dim:
            raise ModelLoadError(
                f"{self.path} rotates {rotated} of {head_dim} head dimensions and the decoder rotates all: "
                "choose another model."
            )
        return head_dim

    @property
    def _theta(self) -> float:
        return self.fields.number(self._key("rope.freq_base"), 10000.0)

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.fields.text(self._key("rope.scaling.type"), "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": _shortest(self.fields.number(self._key("rope.scaling.factor")))}
        if kind != "none":
            raise ModelLoadError(
                f"{self.path} has {self._key('rope.scaling.type')} = {kind!r}, and only 'linear' and Llama 3's scaling "
                "are computed: choose another model."
            )
        if _ROPE_FREQS not in self._tensors:
            return None
        divisors = self.read(_ROPE_FREQS).double()
        scaling = {
            "rope_type": "llama3",
            "factor": max(divisors.flatten().tolist(), default=1.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = llama3_divisors(self._head_dim, self._theta, scaling)
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise ModelLoadError(f"{self.path}: {_ROPE_FREQS} is not Llama 3's RoPE scaling: choose another model.")
        return scaling

    def _unpermuted(self, name: str, rows: torch.Tensor, heads: int) -> torch.Tensor:
        if rows.shape[0] % (2 * heads):
            raise ModelLoadError(
                f"{self.path}: tensor {name} has {rows.shape[0]} rows, which {heads} heads of an even width cannot "
                "share: download or convert the file again."
            )
        return unpermute(rows, heads)

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

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the output rows of q and k (`LlamaModel.permute` in its convert script).

    Llama rotates the pair (i, i + head_dim/2) in Hugging Face's layout and (2i, 2i + 1) in GGUF's, so GGUF stores each
    head's rows interleaved. `rows`: [heads * head_dim, ...], returned in the same shape.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `rows` in the order that `unpermute` undoes: GGUF's, of rows in Hugging Face's."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


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
