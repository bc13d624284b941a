"""The engine: requests and sequences, the scheduler, the sampler, the model runner, the loop that joins them, `LLM`.

The names below are imported when first used (PEP 562), so that the bookkeeping half can be used without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "LLM": "vllm_teach.engine.llm",
    "EngineConfig": "vllm_teach.engine.config",
    "LLMEngine": "vllm_teach.engine.llm_engine",
    "SamplingParams": "vllm_teach.engine.sampling_params",
    "RequestOutput": "vllm_teach.engine.outputs",
    "CompletionOutput": "vllm_teach.engine.outputs",
    "Scheduler": "vllm_teach.engine.scheduler",
    "generate_without_cache": "vllm_teach.engine.uncached",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "generate_without_cache",
]

if TYPE_CHECKING:
    from vllm_teach.engine.config import EngineConfig
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.llm_engine import LLMEngine
    from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
    from vllm_teach.engine.sampling_params import SamplingParams
    from vllm_teach.engine.scheduler import Scheduler
    from vllm_teach.engine.uncached import generate_without_cache


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
