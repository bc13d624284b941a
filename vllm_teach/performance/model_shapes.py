"""The shapes of published models, so that a model can be simulated without its weights.

The figures are those of each model's `config.json` on Hugging Face, or of the table in the paper that is named. Two
kinds are not decoders of this package's family and are approximated, which their names say ("-like"): they have biases,
learnt positions and LayerNorm, a few thousandths of their weights, and an MLP of two matrices of 4 x hidden, for which
SwiGLU's three of 8/3 x hidden stand here, rounded to a multiple of 64: as many weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_teach.errors import InvalidArgumentError, ModelNotFoundError
from vllm_teach.models.config import ModelConfig


@dataclass(frozen=True)
class PublishedShape:
    """A model's `config` and the place where it is published."""

    config: ModelConfig
    source: str


def _shape(
    source: str,
    architecture: str,
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    theta: float = 10000.0,
    tied: bool = False,
    window: int | None = None,
) -> PublishedShape:
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position=context,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        tie_word_embeddings=tied,
        sliding_window=window,
        sliding_layers=(window is not None,) * layers,
    )
    return PublishedShape(config, source)


_LLAMA = "LlamaForCausalLM"
_LLAMA_2 = "Touvron et al. 2023, arXiv 2307.09288; meta-llama/Llama-2-{}-hf"
_GPT_3 = "Brown et al. 2020, arXiv 2005.14165, table 2.1, approximated"

SHAPES = {
    "llama-2-7b": _shape(
        _LLAMA_2.format("7b"), _LLAMA, vocab=32000, hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32,
        context=4096,
    ),
    "llama-2-13b": _shape(
        _LLAMA_2.format("13b"), _LLAMA, vocab=32000, hidden=5120, inner=13824, layers=40, heads=40, kv_heads=40,
        context=4096,
    ),
    "llama-2-70b": _shape(
        _LLAMA_2.format("70b"), _LLAMA, vocab=32000, hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8,
        context=4096,
    ),
    "llama-3-8b": _shape(
        "meta-llama/Meta-Llama-3-8B", _LLAMA, vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8,
        context=8192, theta=500000.0,
    ),
    "llama-3-70b": _shape(
        "meta-llama/Meta-Llama-3-70B", _LLAMA, vocab=128256, hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8,
        context=8192, theta=500000.0,
    ),
    "mistral-7b": _shape(
        "Jiang et al. 2023, arXiv 2310.06825; mistralai/Mistral-7B-v0.1", "MistralForCausalLM", vocab=32000,
        hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, context=32768, window=4096,
    ),
    "smollm2-135m": _shape(
        "HuggingFaceTB/SmolLM2-135M-Instruct", _LLAMA, vocab=49152, hidden=576, inner=1536, layers=30, heads=9,
        kv_heads=3, context=8192, theta=100000.0, tied=True,
    ),
    "opt-13b-like": _shape(
        "Zhang et al. 2022, arXiv 2205.01068, table 1, approximated", _LLAMA, vocab=50272, hidden=5120, inner=13632,
        layers=40, heads=40, kv_heads=40, context=2048, tied=True,
    ),
    "gpt-3-175b-like": _shape(
        _GPT_3, _LLAMA, vocab=50257, hidden=12288, inner=32768, layers=96, heads=96, kv_heads=96, context=2048,
        tied=True,
    ),
    "dialogue-200b-like": _shape(
        "no published shape: GPT-3's with 110 layers, for claims about 200e9 parameters", _LLAMA, vocab=50257,
        hidden=12288, inner=32768, layers=110, heads=96, kv_heads=96, context=2048, tied=True,
    ),
}  # fmt: skip


def shape_names() -> tuple[str, ...]:
    """Return the names of the published shapes."""
    return tuple(SHAPES)


def get_model_shape(name: str | Path) -> ModelConfig:
    """Return the config of the published model `name`, or of what `models.resolve_model` finds: an alias or a folder.

    Raises InvalidArgumentError, listing the names, when it is neither, and what `load_config` raises for a folder with
    a damaged config.json.
    """
    from vllm_teach.models.load import load_config
    from vllm_teach.models.resolve import ALIASES, resolve_model

    if str(name) in SHAPES:
        return SHAPES[str(name)].config
    try:
        return load_config(resolve_model(name))
    except ModelNotFoundError as error:
        raise InvalidArgumentError(
            f"model={str(name)[:80]!r} has no shape here ({str(error).rstrip('.')}): use one of {', '.join(SHAPES)}, "
            f"an alias ({', '.join(ALIASES)}) or a model directory."
        ) from error
