"""Weights in fewer bits: how they are chosen, how they are stored, what a model loses by it, and how that is measured.

The model is always an argument, so this room knows none. The names are imported when first used.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Hessian": "hessian",
    "Perplexity": "sliding_window",
    "PerplexityChange": "bootstrap",
    "QuantizationConfig": "quantization_config",
    "QuantizedCheckpoint": "checkpoint",
    "QuantizedWeight": "quantized_weight",
    "perplexity": "sliding_window",
    "perplexity_change": "bootstrap",
    "quantize_gptq": "gptq",
    "quantize_layers": "calibration",
    "quantize_rtn": "rounding",
    "search_clip": "awq",
    "search_scales": "awq",
}

__all__ = [
    "Hessian",
    "Perplexity",
    "PerplexityChange",
    "QuantizationConfig",
    "QuantizedCheckpoint",
    "QuantizedWeight",
    "perplexity",
    "perplexity_change",
    "quantize_gptq",
    "quantize_layers",
    "quantize_rtn",
    "search_clip",
    "search_scales",
]

if TYPE_CHECKING:
    from vllm_teach.quantization.awq import search_clip, search_scales
    from vllm_teach.quantization.bootstrap import PerplexityChange, perplexity_change
    from vllm_teach.quantization.calibration import quantize_layers
    from vllm_teach.quantization.checkpoint import QuantizedCheckpoint
    from vllm_teach.quantization.gptq import quantize_gptq
    from vllm_teach.quantization.hessian import Hessian
    from vllm_teach.quantization.quantization_config import QuantizationConfig
    from vllm_teach.quantization.quantized_weight import QuantizedWeight
    from vllm_teach.quantization.rounding import quantize_rtn
    from vllm_teach.quantization.sliding_window import Perplexity, perplexity


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
