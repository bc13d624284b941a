"""How much of the forward pass is attention, and which backends compute it: two of the articles' metrics.

On a CPU a layer's call is timed by the host's clock. On a GPU a call returns when its kernels are queued, so there the
device notes the times itself (CUDA events), in one pass of eight only: to have them noted takes the host time, too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_teach.models.attend import Attend

GPU_PASSES = 8  # two events a layer are one or two per cent of what launching its kernels takes the host


class PagedAttend(Attend, Protocol):
    """An `attend` that can say which backend serves the layers of a window."""

    def backend(self, window: int | None) -> str:
        """Return its name, once one of these layers was computed."""
        ...


class AttentionMeter:
    """Watches the forward passes of a model on `device`; one that fails counts for nothing.

    `calls` counts attention calls by backend. `forward_seconds` are those of the passes that were timed, and
    `attention_seconds` the part in which layers stored K and V and attended. Logits and sampling belong to neither.
    """

    def __init__(self, device: torch.device) -> None:
        self.calls: Counter[str] = Counter()
        self.forward_seconds = 0.0
        self.attention_seconds = 0.0
        self._clock: _Clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._num_passes = 0
        self._unread: list[Any] = []  # the marks of the pass that was timed last: begin, (start, end) of each call, end

    @contextmanager
    def watch(self, attend: PagedAttend) -> Iterator[Attend]:
        """Yield `attend` so that its calls are seen; the `with` block is one forward pass."""
        timed = self._num_passes % self._clock.every == 0
        self._num_passes += 1
        if timed:
            self.settle()
        watched = _Watched(attend, self._clock.mark) if timed else _Watched(attend, None)
        begin = self._clock.mark() if timed else None
        yield watched
        if timed:
            self._unread = [begin, *watched.marks, self._clock.mark()]
        for window, count in Counter(watched.windows).items():
            self.calls[attend.backend(window)] += count

    def settle(self) -> None:
        """Bring the seconds up to date. Waits for the device where the last pass is a timed one and still computed."""
        if self._unread:
            begin, *marks, end = self._unread
            self.forward_seconds += self._clock.seconds(begin, end)
            self.attention_seconds += sum(map(self._clock.seconds, marks[::2], marks[1::2]))
            self._unread = []


class _Watched:
    """`attend`, noting the window of each call and, with `mark`, when it began and ended."""

    def __init__(self, attend: Attend, mark: Callable[[], Any] | None) -> None:
        self._attend, self._mark = attend, mark
        self.windows: list[int | None] = []
        self.marks: list[Any] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        self.windows.append(window)
        if self._mark is None:
            return self._attend(layer, q, k, v, window=window)
        self.marks.append(self._mark())
        out = self._attend(layer, q, k, v, window=window)
        self.marks.append(self._mark())
        return out


class _Clock(Protocol):
    every: int

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class _HostClock:
    every = 1

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _DeviceClock:
    every = GPU_PASSES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3
