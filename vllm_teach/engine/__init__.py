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
    "SchedulerConfig": "scheduler_config",
    "EventLog": "events",
    "Plan": "plan",
    "generate_without_cache": "uncached",
    "BeamSearchParams": "beam_params",
    "search_beams": "beam_search",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "EventLog",
    "LLMEngine",
    "Plan",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "generate_without_cache",
    "search_beams",
]

if TYPE_CHECKING:
    from vllm_teach.engine.beam_params import BeamSearchParams
    from vllm_teach.engine.beam_search import search_beams
    from vllm_teach.engine.config import EngineConfig
    from vllm_teach.engine.events import EventLog
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.llm_engine import LLMEngine
    from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
    from vllm_teach.engine.plan import Plan
    from vllm_teach.engine.sampling_params import SamplingParams
    from vllm_teach.engine.scheduler import Scheduler
    from vllm_teach.engine.scheduler_config import SchedulerConfig
    from vllm_teach.engine.uncached import generate_without_cache


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
