"""The engine: requests and sequences, the scheduler, the sampler, the model runner, the loop that joins them, `LLM`.

The names below are imported when first used (PEP 562), so that the bookkeeping half can be used without torch.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "LLM": "llm",
    "EngineConfig": "config",
    "LLMEngine": "llm_engine",
    "SamplingParams": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Scheduler": "scheduler",
    "generate_without_cache": "uncached",
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
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
