"""How much memory a piece of code needs at its worst moment: exact on a CPU, from the allocator on a GPU.

On a CPU, PyTorch's profiler reports each allocation and release of tensor memory with its address, temporaries inside
an operator included. The count is exact and the same in every run of one PyTorch version. It cannot see what is not
allocated by PyTorch's tensor allocator: scratch space of MKL and oneDNN, NumPy arrays, Python objects, code. Views own
no memory and count as nothing; memory that was released and is used again counts once.
"""

import gc
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import device_name

OUTSIDE = "outside"


@dataclass(frozen=True)
class MemoryStep:
    """One allocation (positive bytes) or release (negative), the operator it fell in, and the bytes alive after it."""

    operator: str
    region: str
    delta: int
    live: int


@dataclass(frozen=True)
class MemoryTrace:
    """Every allocation and release of one call, in order. `live` counts bytes above those held when the call began.

    `at_peak` splits the bytes that the call had allocated and that were alive at the peak by `region`; `allocated` sums
    all bytes ever allocated in each region, released or not. Both have the key "outside" for what no region covers.
    """

    steps: tuple[MemoryStep, ...]
    peak: int
    at_peak: dict[str, int]
    allocated: dict[str, int]


def peak_memory(fn: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Call `fn` and return the most bytes of tensor memory it held at one moment, above what was held before.

    Its result counts, being alive at the end. On "cpu" `fn` is called once; see this module's text for what cannot be
    seen, and `trace_memory` for what is mutated. On "cuda" it is called twice, as the first call may leave a cuBLAS
    workspace behind, and the number is `torch.cuda.max_memory_allocated` of the second, which rounds each allocation up
    to 512 bytes; mutates the device's peak statistics. Raises InvalidArgumentError for another device, a "cuda"
    that is not there, and on "cpu" inside a trace that runs already; and whatever `fn` raises.
    """
    device = device_name(device, "memory counter")
    if device == "cpu":
        return trace_memory(fn).peak
    fn()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def region(name: str) -> AbstractContextManager[object]:
    """Name a stretch of code, so that `trace_memory(fn, regions={name})` tells its allocations apart."""
    return record_function(name)


def trace_memory(fn: Callable[[], object], regions: Collection[str] = ()) -> MemoryTrace:
    """Call `fn` once and return each allocation and release of CPU tensor memory on the calling thread.

    `regions` are names that `fn` marks with `region(name)`; the innermost one counts. Python's cyclic garbage collector
    runs before and pauses during the call, so that older garbage does not die in the middle of it. Mutates the
    environment: KINETO_LOG_LEVEL becomes 6 where it is not set. Raises InvalidArgumentError inside another trace
    or PyTorch profiler, as only one can run at a time, and whatever `fn` raises.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise InvalidArgumentError(
            f"fn={fn!r} cannot be traced inside another trace or profiler: measure the one after the other."
        )
    # Otherwise PyTorch's profiler prints two lines with the time and the process's number to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            result = fn()
    finally:
        if collects:
            gc.enable()
    assert recording.profiler is not None
    assert recording.profiler.kineto_results is not None
    roots = recording.profiler.kineto_results.experimental_event_tree()
    del result
    found = [event for root in roots for event in _allocations(root, "python", OUTSIDE, regions)]
    return _summarise(sorted(found, key=lambda event: event[0]), regions)


# time in ns, address, bytes (negative: released), operator, region
_Event = tuple[int, int, int, str, str]


def _allocations(node: Any, operator: str, inside: str, regions: Collection[str]) -> Iterator[_Event]:
    """Walk the profiler's tree of calls and yield its CPU allocations with the operator and region they fall in."""
    if node.name == "[memory]":
        fields = node.extra_fields
        if fields.device.type == "cpu":
            yield node.start_time_ns, fields.ptr, fields.alloc_size, operator, inside
        return
    if node.name in regions:
        inside = node.name
    elif node.name.startswith("aten::"):
        operator = node.name
    for child in node.children:
        yield from _allocations(child, operator, inside, regions)


def _summarise(events: list[_Event], regions: Collection[str]) -> MemoryTrace:
    steps: list[MemoryStep] = []
    live = peak = 0
    owners: dict[int, tuple[str, int]] = {}
    at_peak = held = dict.fromkeys((OUTSIDE, *regions), 0)
    held, allocated = dict(held), dict(held)
    for _, address, delta, operator, inside in events:
        live += delta
        if delta > 0:
            owners[address] = (inside, delta)
            held[inside] += delta
            allocated[inside] += delta
        elif address in owners:
            owner, size = owners.pop(address)
            held[owner] -= size
        steps.append(MemoryStep(operator, inside, delta, live))
        if live > peak:
            peak, at_peak = live, dict(held)
    return MemoryTrace(tuple(steps), peak, at_peak, allocated)
