"""The ranks' collective operations, counted, and what it looks like when a rank is no longer there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_teach.errors import EngineDeadError

# What three or more ranks send directly: more is better sent in a ring, where each byte goes out less than twice.
_SMALL = 64 << 10


@dataclass
class Traffic:
    """How often something was sent, and how many bytes it has in all: one rank's tensors, however often they travel."""

    calls: int = 0
    num_bytes: int = 0


class Group:
    """`size` processes that call the same operations in the same order; this one is `rank`. Rank 0 drives.

    Each operation waits for the other ranks, `timeout` seconds at most. A rank that died is noticed at once, as its
    connections close (NCCL may wait for the timeout); then, and after the timeout, EngineDeadError is raised. It is
    raised by every operation after one that was left by an exception, a Ctrl-C say: nobody knows how much of that one
    took place, and what the others send would be taken for something else.

    `traffic` counts calls and bytes by operation, "all_reduce", "broadcast" and "gather". Of bytes that are all-reduced
    each rank sends size - 1 copies, or in a ring, where there are many or NCCL is used, 2 (size - 1) / size.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._others = [other for other in range(size) if other != rank]
        self.traffic = {name: Traffic() for name in ("all_reduce", "broadcast", "gather")}
        self._backend: Any = None
        self._left = 0  # all-reduces that the others still expect
        self._out_of_step = False

    def connect(self, store: dist.Store, host: str, *, nccl: bool = False, patience: float | None = None) -> None:
        """Meet the other ranks by way of `store`; `host` is this machine's address that they can reach.

        With `nccl`, tensors are on GPUs, one a rank; else gloo takes tensors of any device. Waits `patience` seconds at
        most, by default `timeout`.
        """
        limit = timedelta(seconds=patience or self.timeout)
        if nccl:
            # Else `wait` returns at once: who hangs is not noticed here, and NCCL's watchdog ends the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._backend = self._checked(lambda: dist.ProcessGroupNCCL(store, self.rank, self.size, options))
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # By default gloo listens at the address of the machine's name, for everybody.
        options._devices = [self._checked(lambda: dist.ProcessGroupGloo.create_device(hostname=host))]
        options._timeout = limit
        self._backend = self._checked(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by the sum of all ranks' `x`, in place, and return it; all ranks get the same bits."""
        self._left -= 1
        direct = self._is_direct(x) and (self.size == 2 or x.nbytes <= _SMALL)
        self._run("all_reduce", x, self._add_up if direct else lambda x: self._backend.allreduce([x]).wait())
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace `x` by rank 0's, in place, and return it."""

        def send(x: Tensor) -> None:
            self._exchange(dict.fromkeys(self._others, x), {}) if self.rank == 0 else self._exchange({}, {0: x})

        self._run("broadcast", x, send if self._is_direct(x) else lambda x: self._backend.broadcast([x]).wait())
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return the `x`, all of one shape, of all ranks in their order on rank 0, and None on the others."""

        def collect(x: Tensor) -> list[Tensor] | None:
            parts = [x, *(torch.empty_like(x) for _ in self._others)] if self.rank == 0 else None
            if self._is_direct(x):
                self._exchange({0: x}, {}) if parts is None else self._exchange({}, dict(enumerate(parts[1:], start=1)))
            else:
                options = dist.GatherOptions()
                options.rootRank = 0
                self._backend.gather([] if parts is None else [parts], [x], options).wait()
            return parts

        return self._run("gather", x, collect)

    def _is_direct(self, x: Tensor) -> bool:
        """Whether `x` goes from rank to rank: gloo's own operations take two or three times as long for little ones."""
        return x.device.type == "cpu"

    def _add_up(self, x: Tensor) -> None:
        parts = {rank: torch.empty_like(x) for rank in self._others}
        self._exchange(dict.fromkeys(self._others, x), parts)
        parts[self.rank] = x
        total = parts[0] + parts[1]
        for rank in range(2, self.size):  # in this order everywhere
            total += parts[rank]
        x.copy_(total)

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Send and receive, by rank, all at the same time."""
        under_way = [self._backend.recv([x], rank, 0) for rank, x in received.items()]
        under_way += [self._backend.send([x], rank, 0) for rank, x in sent.items()]
        for work in under_way:
            work.wait(timedelta(seconds=self.timeout))

    @contextmanager
    def all_reduces(self, count: int, like: Callable[[], Tensor]) -> Iterator[None]:
        """Run a block of `count` all-reduces, each of a tensor as `like` makes one, that every rank runs.

        Where the block fails on this rank the others would wait for it: it takes part in what is left of them with NaN,
        so that all come to the end, and whoever reads the sums sees that they are none. Then the error goes on.
        """
        self._left = count
        try:
            yield
        except BaseException:
            self._finish_with_nan(like)
            raise

    def _finish_with_nan(self, like: Callable[[], Tensor]) -> None:
        try:
            if self._left > 0 and not self._out_of_step:
                x = like().fill_(torch.nan)
                while self._left > 0:
                    self.all_reduce(x)
        finally:
            self._out_of_step |= self._left > 0

    def _run(self, name: str, x: Tensor, operation: Callable[[Tensor], Any]) -> Any:
        result = self._checked(lambda: operation(x))
        self.traffic[name].calls += 1
        self.traffic[name].num_bytes += x.nbytes
        return result

    def _checked(self, action: Callable[[], Any]) -> Any:
        """Return what `action` does, which the others count on; whatever leaves it leaves the ranks out of step."""
        if self._out_of_step:
            raise self._lost("an operation was broken off")
        self._out_of_step = True
        try:
            result = action()
        except RuntimeError as error:  # PyTorch has no other type for it
            raise self._lost(_reason(error)) from error
        self._out_of_step = False
        return result

    def _lost(self, why: str) -> EngineDeadError:
        return EngineDeadError(f"rank {self.rank} of {self.size} lost the other ranks ({why}): load the model again.")


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message, without the place in its source."""
    return re.sub(r"^\[\S+?:\d+\] ", "", str(error)).partition(". ")[0][:200]
