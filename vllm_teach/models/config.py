"""What a decoder of the Llama family looks like, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_teach.errors import ModelLoadError

# What transformers' own configuration classes assume where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 128},
}
ARCHITECTURES = tuple(_DEFAULTS)
_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
_ROPE_TYPES = ("default", "linear", "llama3")


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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype_name: str = "float32"

    def window(self, layer: int) -> int | None:
        """Return how many keys, the token's own included, a query of `layer` may see; None for all before it."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dict of a Hugging Face `config.json`, of transformers 4 or 5.

        Raises ModelLoadError for an architecture or a feature that this decoder does not compute: nothing that
        changes the model's output is skipped in silence.
        """
        architecture = _architecture(config)
        values = {**_DEFAULTS[architecture], **{key: value for key, value in config.items() if value is not None}}
        # An explicit null means "off" for the window (Mistral v0.2 on), not "the default".
        if "sliding_window" in config and config["sliding_window"] is None:
            values.pop("sliding_window", None)
        _refuse_unsupported(values)
        hidden, heads = _integer(values, "hidden_size"), _integer(values, "num_attention_heads")
        window, sliding = _windows(architecture, values)
        theta, scaling = _rope(values)
        qwen2 = architecture == "Qwen2ForCausalLM"
        result = cls(
            architecture=architecture,
            vocab_size=_integer(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size"),
            num_layers=_integer(values, "num_hidden_layers"),
            num_q_heads=heads,
            num_kv_heads=_integer(values, "num_key_value_heads", heads),
            head_dim=_integer(values, "head_dim", hidden // heads),
            max_position=_integer(values, "max_position_embeddings"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            # Qwen2 always has biases on q, k and v and never on the output; the others say.
            attention_bias=qwen2 or bool(values.get("attention_bias", False)),
            attention_out_bias=not qwen2 and bool(values.get("attention_bias", False)),
            mlp_bias=bool(values.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=window,
            sliding_layers=sliding,
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
            dtype_name=str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch."),
        )
        if result.num_q_heads % result.num_kv_heads:
            raise ModelLoadError(
                f"config.json has num_attention_heads = {result.num_q_heads}, which is no multiple of "
                f"num_key_value_heads = {result.num_kv_heads}; check the file."
            )
        return result


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))]
    for name in names:
        if name in _DEFAULTS:
            return str(name)
    raise ModelLoadError(
        f"config.json names the architecture {names[0]!r}, which is not supported; use a model of one of "
        f"{', '.join(ARCHITECTURES)}."
    )


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json has {key} = {value!r} where a positive whole number is needed; check it.")
    return value


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(
            f"config.json has hidden_act = {values['hidden_act']!r}, but only 'silu' is supported; use another model."
        )
    if "quantization_config" in values:
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"config.json has a quantization_config ({method}), which is not supported; use the unquantised model."
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(
            f"config.json has partial_rotary_factor = {values['partial_rotary_factor']}, but only 1.0 is "
            "supported; use another model."
        )


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers slide, by the rules of transformers' classes."""
    layers = _integer(values, "num_hidden_layers")
    if architecture == "LlamaForCausalLM" or values.get("sliding_window") is None:
        return None, (False,) * layers
    window = _integer(values, "sliding_window")
    if architecture == "MistralForCausalLM":
        return window, (True,) * layers
    if not values.get("use_sliding_window", False):
        return None, (False,) * layers
    first = int(values.get("max_window_layers", 28))
    types = values.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise ModelLoadError(
            f"config.json has layer_types {sorted(unknown) or len(types)} for {layers} layers; use a model that names "
            "'full_attention' or 'sliding_attention' for each."
        )
    return window, tuple(kind == "sliding_attention" for kind in types)


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling; transformers 5 writes `rope_parameters`, transformers 4 two separate keys."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or values.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind not in _ROPE_TYPES:
        raise ModelLoadError(
            f"config.json has the rope type {kind!r}, which is not supported; use a model with one of "
            f"{', '.join(_ROPE_TYPES)}."
        )
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(
            "config.json has a partial_rotary_factor other than 1.0, which is not supported; use another model."
        )
    if kind == "default":
        return theta, None
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", _integer(values, "max_position_embeddings"))
    needed = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}[kind]
    for key in needed:
        if not isinstance(rope.get(key), int | float):
            raise ModelLoadError(
                f"config.json has {key} = {rope.get(key)!r} for rope type {kind!r} where a number is needed; check it."
            )
    return theta, {"rope_type": kind, **rope}


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
