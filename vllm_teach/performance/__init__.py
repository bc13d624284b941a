"""What this machine can do and what a piece of code costs on it: time, memory, ceilings, shares.

The names below are imported when first used, so that `import vllm_teach.performance` loads no torch.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "measure_backends": "backend_race",
    "log_log_slope": "growth",
    "KVCacheComparison": "kv_cache_accuracy",
    "compare_kv_caches": "kv_cache_accuracy",
    "Machine": "machine",
    "Rate": "machine",
    "measure_this_machine": "machine",
    "MemoryTrace": "memory",
    "peak_memory": "memory",
    "trace_memory": "memory",
    "Race": "side_by_side",
    "race": "side_by_side",
    "attainable": "roofline",
    "Point": "roofline",
    "LayerShape": "shares",
    "Share": "shares",
    "flop_share": "shares",
    "measure_share": "shares",
    "Timing": "timing",
    "time_median": "timing",
}

__all__ = [
    "KVCacheComparison",
    "LayerShape",
    "Machine",
    "MemoryTrace",
    "Point",
    "Race",
    "Rate",
    "Share",
    "Timing",
    "attainable",
    "compare_kv_caches",
    "flop_share",
    "log_log_slope",
    "measure_backends",
    "measure_share",
    "measure_this_machine",
    "peak_memory",
    "race",
    "time_median",
    "trace_memory",
]

if TYPE_CHECKING:
    from vllm_teach.performance.backend_race import measure_backends
    from vllm_teach.performance.growth import log_log_slope
    from vllm_teach.performance.kv_cache_accuracy import KVCacheComparison, compare_kv_caches
    from vllm_teach.performance.machine import Machine, Rate, measure_this_machine
    from vllm_teach.performance.memory import MemoryTrace, peak_memory, trace_memory
    from vllm_teach.performance.roofline import Point, attainable
    from vllm_teach.performance.shares import LayerShape, Share, flop_share, measure_share
    from vllm_teach.performance.side_by_side import Race, race
    from vllm_teach.performance.timing import Timing, time_median


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
