"""Where experiments run: the device, how thorough to be, and what was measured already for another row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from vllm_teach.engine.heap import keep_large_blocks
from vllm_teach.errors import VllmTeachError
from vllm_teach.performance.timing import device_name

if TYPE_CHECKING:
    from vllm_teach.models.tokenizer import Tokenizer

T = TypeVar("T")

MODEL = "smollm2"


class Lab:
    """One run's place. `device` is "cpu" or "cuda"; `quick` asks for smaller workloads and fewer repetitions.

    `shared` has the seconds of what was measured once for several rows, by its name.

    Raises InvalidArgumentError for a device that is not there.
    """

    def __init__(self, device: str = "cpu", quick: bool = False) -> None:
        self.device = device_name(device, "clock")
        if not self.on_gpu:
            # As every engine does: whether a race times page faults would else depend on which experiments came before.
            keep_large_blocks()
        self.quick = quick
        self.shared: dict[str, float] = {}
        self._done: dict[object, object] = {}

    def once(self, measure: Callable[[Lab], T]) -> T:
        """Return what `measure` returned the first time it was asked for in this run.

        What it raised then, if that was a typed error, is raised again: minutes are not spent twice on it.
        """
        if measure not in self._done:
            started = time.perf_counter()
            try:
                self._done[measure] = measure(self)
            except VllmTeachError as error:
                self._done[measure] = error
            finally:
                self.shared[measure.__name__.replace("_", " ")] = time.perf_counter() - started
        found = self._done[measure]
        if isinstance(found, VllmTeachError):
            raise found
        return found  # type: ignore[return-value]

    def pick(self, full: T, quick: T) -> T:
        """Return one of two by how thorough this run is to be."""
        return quick if self.quick else full

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep PyTorch to one thread of the processor, so that a race of algorithms times no waiting for each other."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def on_gpu(self) -> bool:
        """Whether this run measures a GPU."""
        return self.device.startswith("cuda")

    @cached_property
    def is_a100(self) -> bool:
        """Whether the device is the one that the articles measured, so that absolute figures can be compared.

        No run on an A100 has tested yet what depends on this.
        """
        if not self.on_gpu:
            return False
        import torch

        return "A100" in torch.cuda.get_device_name(self.device)

    @cached_property
    def label(self) -> str:
        """The device in words: "AMD EPYC, 1 thread"."""
        from vllm_teach.performance.machine import device_label

        return device_label(self.device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The real model's tokenizer; raises ModelNotFoundError where it was not fetched."""
        from vllm_teach.models import load_tokenizer, resolve_model

        return load_tokenizer(resolve_model(MODEL))
