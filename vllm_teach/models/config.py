"""What a decoder of the Llama family looks like, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.fields import Fields

# What transformers' own configuration classes assume where config.json is silent.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": {**_QWEN2, "head_dim": 128},
}
ARCHITECTURES = tuple(_DEFAULTS)
_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
_ROPE_TYPES = ("default", "linear", "llama3")
# Positions are kept in 32 bits by some kernels; the longest contexts so far are 10 million tokens.
_LARGEST_POSITION = 2**31 - 1
# Far above any model: a damaged count is refused before that many modules are made.
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. Sizes count elements, not bytes.

    `sliding_layers[i]` says whether layer i sees only the last `sliding_window` keys (its own token included).
    `rope_scaling` is None, or a dict with `rope_type` ("linear" or "llama3") and that type's factors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()

    def window(self, layer: int) -> int | None:
        """Return how many keys, the token's own included, a query of `layer` may see; None for all before it."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read the dict of a Hugging Face `config.json`, of transformers 4 or 5; `source` is how errors name the file.

        Raises ModelLoadError for an architecture or a feature that this decoder does not compute, and for a value that
        cannot be: nothing that changes the model's output is skipped in silence. How weights are quantised is not asked
        here but where they are read (`quantization.read_config`).
        """
        architecture = _architecture(Fields(config, source))
        # A null stands over the default: it means "off" for the window, "one per query head" for the key/value heads.
        fields = Fields({**_DEFAULTS[architecture], **config}, source)
        _refuse_unsupported(fields)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim, kv_heads = fields.integer("head_dim", hidden // heads), fields.integer("num_key_value_heads", heads)
        if head_dim % 2:
            raise fields.refusal("head_dim", "an even number", head_dim)
        if heads % kv_heads:
            raise fields.refusal("num_attention_heads", f"a multiple of num_key_value_heads = {kv_heads}", heads)
        window, sliding = _windows(architecture, fields)
        theta, scaling = _rope(fields)
        qwen2, bias = architecture == "Qwen2ForCausalLM", fields.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", maximum=_MOST_LAYERS),
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            # A prompt has a token at least, and one more is what a model is asked for.
            max_position=fields.integer("max_position_embeddings", minimum=2, maximum=_LARGEST_POSITION),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            # Qwen2 always has biases on q, k and v and never on the output; the others say.
            attention_bias=qwen2 or bias,
            attention_out_bias=bias and not qwen2,
            mlp_bias=fields.flag("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=window,
            sliding_layers=sliding,
        )


def _architecture(fields: Fields) -> str:
    model_type = fields.text("model_type", "")
    names = fields.items("architectures", str, []) or [_MODEL_TYPES.get(model_type, model_type)]
    for name in names:
        if name in _DEFAULTS:
            return name
    raise ModelLoadError(
        f"{fields.source} names the architecture {names[0]!r}, which is not supported: use a model of one of "
        f"{', '.join(ARCHITECTURES)}."
    )


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"{fields.source} has hidden_act = {activation!r}, but only 'silu' is supported: use another model."
        )
    _refuse_partial_rotation(fields)


def _refuse_partial_rotation(fields: Fields) -> None:
    factor = fields.number("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ModelLoadError(
            f"{fields.source} has partial_rotary_factor = {factor}, but only 1.0 is supported: use another model."
        )


def _windows(architecture: str, fields: Fields) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers slide, by the rules of transformers' classes."""
    layers = fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    nowhere = (None, (False,) * layers)
    if architecture == "LlamaForCausalLM" or "sliding_window" not in fields:
        return nowhere
    window = fields.integer("sliding_window", maximum=_LARGEST_POSITION)
    if architecture == "MistralForCausalLM":
        return window, (True,) * layers
    if not fields.flag("use_sliding_window", False):
        return nowhere
    first = fields.integer("max_window_layers", minimum=0)
    types = fields.items(
        "layer_types", str, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    )
    if set(types) - {"sliding_attention", "full_attention"} or len(types) != layers:
        raise fields.refusal("layer_types", f"'full_attention' or 'sliding_attention' for each of {layers} layers")
    return window, tuple(kind == "sliding_attention" for kind in types)


def _rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling; transformers 5 writes `rope_parameters`, transformers 4 two separate keys."""
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    rope = old if old.values else new
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_TYPES or any(isinstance(value, Mapping) for value in rope.values.values()):
        kind = kind if kind not in _ROPE_TYPES else "one per kind of layer"
        raise ModelLoadError(
            f"{fields.source} has the rope type {kind!r}, which is not supported: use a model with one of "
            f"{', '.join(_ROPE_TYPES)}."
        )
    _refuse_partial_rotation(rope)
    if kind == "default":
        return theta, None
    scaling = {"rope_type": kind, "factor": rope.number("factor")}
    if kind == "linear":
        return theta, scaling
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.refusal("high_freq_factor", f"a number above low_freq_factor = {low}")
    key = "original_max_position_embeddings"
    context = fields.integer("max_position_embeddings", maximum=_LARGEST_POSITION)
    # transformers reads it beside the scaling's own entries too, and then prefers it.
    trained = fields.integer(key, rope.integer(key, context, maximum=_LARGEST_POSITION), maximum=_LARGEST_POSITION)
    return theta, {**scaling, "low_freq_factor": low, "high_freq_factor": high, key: trained}
