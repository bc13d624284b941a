"""The language models: where they come from, how their files are read, and the decoder that runs them.

`resolve_model` turns a name into a directory, `load_model` turns the directory into a `Decoder`, `load_tokenizer` into
a `Tokenizer`. The names are imported when first used, so that listing models costs no torch import.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Decoder": "decoder",
    "ModelConfig": "config",
    "Tokenizer": "tokenizer",
    "fetch_smollm2": "fetch",
    "full_causal": "attend",
    "load_model": "load",
    "load_tokenizer": "tokenizer",
    "quantize_model": "quantize",
    "resolve_model": "resolve",
}

__all__ = [
    "Decoder",
    "ModelConfig",
    "Tokenizer",
    "fetch_smollm2",
    "full_causal",
    "load_model",
    "load_tokenizer",
    "quantize_model",
    "resolve_model",
]

if TYPE_CHECKING:
    from vllm_teach.models.attend import full_causal
    from vllm_teach.models.config import ModelConfig
    from vllm_teach.models.decoder import Decoder
    from vllm_teach.models.fetch import fetch_smollm2
    from vllm_teach.models.load import load_model
    from vllm_teach.models.quantize import quantize_model
    from vllm_teach.models.resolve import resolve_model
    from vllm_teach.models.tokenizer import Tokenizer, load_tokenizer


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
