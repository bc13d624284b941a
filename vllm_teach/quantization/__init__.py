"""What a model loses when its weights are stored in fewer bits, and how that is measured.

The model is always an argument, so this room knows none. The names are imported when first used.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {"Perplexity": "sliding_window", "perplexity": "sliding_window"}

__all__ = ["Perplexity", "perplexity"]

if TYPE_CHECKING:
    from vllm_teach.quantization.sliding_window import Perplexity, perplexity


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
