"""Time one call on a GPU: device time from events, with a cold L2 cache and the launches queued in advance.

A call of a few microseconds would otherwise measure Python: the GPU would wait for each launch. Here it is given
something else to do while the processor queues the events and the call; only then does it start on them. What the
processor needs per call, when nothing hides it, is measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm_teach.performance.timing import Timing

REPEATS = 10
_BUSY_CYCLES = 1_000_000  # about half a millisecond


def measure(call: Callable[[], object], device: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Return milliseconds of `call`: median, low and high of `repeats` runs, and those of calls back to back.

    On "cuda" the median is device time and `back_to_back_ms` the wall time per call of a row of calls with a warm
    cache, launches included. On "cpu" both are wall time. Two calls before warm up and are not measured.
    """
    for _ in range(2):
        call()
    once = _device_seconds if device == "cuda" else _wall_seconds
    timing = Timing.of([once(call) for _ in range(repeats)])
    return {
        "median_ms": _ms(timing.median),
        "low_ms": _ms(timing.low),
        "high_ms": _ms(timing.high),
        "repeats": repeats,
        "back_to_back_ms": _ms(_row_seconds(call, device, repeats)),
    }


def _device_seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    _flush_buffer().zero_()  # evicts the inputs, which a real call would not find in the cache either
    torch.cuda._sleep(_BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _flush_buffer() -> torch.Tensor:
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return torch.empty(4 * max(cache_bytes, 32 << 20), dtype=torch.int8, device="cuda")


def _wall_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _row_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)
