"""A teaching reference implementation of a vLLM-style inference system.

`import vllm_teach` loads neither torch nor transformers: the names below are imported when first used (PEP 562).
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy
from vllm_teach.version import __version__

_HOMES = {
    "LLM": "engine.llm",
    "SamplingParams": "engine.sampling_params",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "BeamSearchParams": "engine.beam_params",
}

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from vllm_teach.engine.beam_params import BeamSearchParams
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
    from vllm_teach.engine.sampling_params import SamplingParams


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
