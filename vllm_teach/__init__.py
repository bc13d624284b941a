"""A teaching reference implementation of a vLLM-style inference system.

`import vllm_teach` loads neither torch nor transformers: the names below are imported when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "LLM": "vllm_teach.engine.llm",
    "SamplingParams": "vllm_teach.engine.sampling_params",
    "RequestOutput": "vllm_teach.engine.outputs",
    "CompletionOutput": "vllm_teach.engine.outputs",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
    from vllm_teach.engine.sampling_params import SamplingParams


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
