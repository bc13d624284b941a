"""Time a function honestly: warm up, repeat, report the median with its spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, the fastest and the slowest, and every sample in the order taken."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        """Summarise samples, in seconds."""
        return cls(statistics.median(samples), min(samples), max(samples), tuple(samples))


def time_median(fn: Callable[[], object], repeats: int = 5, warmup: int = 1, device: str = "cpu") -> Timing:
    """Call `fn` `warmup` + `repeats` times and return the seconds of the `repeats` calls.

    The median is robust against the odd interruption by another process. On `device="cuda"`, kernels run after the call
    returned, so CUDA events on the current stream take the time instead of the processor's clock. Raises
    InvalidArgumentError when `repeats` is below 1 or `warmup` below 0.
    """
    if repeats < 1:
        raise InvalidArgumentError(f"repeats={repeats} measures nothing: use 1 or more.")
    if warmup < 0:
        raise InvalidArgumentError(f"warmup={warmup} is no number of calls: use 0 or more.")
    once = _time_on_gpu if device.startswith("cuda") else _time_on_cpu
    for _ in range(warmup):
        fn()
    return Timing.of([once(fn) for _ in range(repeats)])


def _time_on_cpu(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _time_on_gpu(fn: Callable[[], object]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
