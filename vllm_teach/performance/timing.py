"""Time a function honestly: warm up, repeat, report the median with its spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


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


def time_median(
    fn: Callable[[], object], repeats: int = 5, warmup: int = 1, device: "str | torch.device" = "cpu"
) -> Timing:
    """Call `fn` `warmup` + `repeats` times and return the seconds of the `repeats` calls.

    The median is robust against the odd interruption by another process. On `device="cuda"`, kernels run after the call
    returned, so CUDA events on the current stream take the time instead of the processor's clock. Raises
    InvalidArgumentError when `repeats` is below 1, `warmup` below 0 or one of them no whole number, and for a device
    that has no clock here: neither "cpu" nor a "cuda" that is there.
    """
    check_calls("repeats", repeats, 1, "measures nothing")
    check_calls("warmup", warmup, 0, "is no number of calls")
    once = stopwatch(device_name(device, "clock"))
    for _ in range(warmup):
        fn()
    return Timing.of([once(fn) for _ in range(repeats)])


def check_calls(argument: str, value: int, least: int, complaint: str) -> None:
    """Raise InvalidArgumentError unless `value` is a whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidArgumentError(f"{argument}={value!r} {complaint}: use a whole number, {least} or more.")


def device_name(device: "str | torch.device", meter: str) -> str:
    """Return `device` as a text, "cpu", "cuda" or "cuda:0"; `meter` names what a measurement needs of it.

    Raises InvalidArgumentError for any other device, and for "cuda" where there is none.
    """
    text = str(device)
    kind, _, index = text.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return "cpu"
    if kind != "cuda" or (index and not (index.isascii() and index.isdecimal())):
        raise InvalidArgumentError(f"device={text!r} has no {meter} here: use 'cpu' or 'cuda'.")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise InvalidArgumentError(f"device={text!r} is not there, as PyTorch sees {count} CUDA devices: use 'cpu'.")
    return text


def stopwatch(device: str) -> Callable[[Callable[[], object]], float]:
    """Return what runs a function once and tells its seconds on `device`, a name from `device_name`."""
    return _time_on_gpu if device.startswith("cuda") else _time_on_cpu


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
