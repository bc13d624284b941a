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


@dataclass
class Traffic:
    """How often something was sent, and how many bytes it has in all: one rank's tensors, however often they travel."""

    calls: int = 0
    num_bytes: int = 0


class Group:
    """`size` processes that call the same operations in the same order; this one is `rank`. Rank 0 drives.

    Each operation waits for the other ranks, `timeout` seconds at most. A rank that died is noticed at once, as its
    connections close; then, and after the timeout, EngineDeadError is raised, and the group is of no use any more.

    `traffic` counts calls and bytes by operation, "all_reduce", "broadcast" and "gather". A ring, which gloo and NCCL
    use, sends 2 (size - 1) / size of all-reduced bytes from each rank.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.traffic = {name: Traffic() for name in ("all_reduce", "broadcast", "gather")}
        self._backend: Any = None
        self._left = 0  # all-reduces that the others still expect

    def connect(self, store: dist.Store, host: str, *, nccl: bool = False) -> None:
        """Meet the other ranks by way of `store`; `host` is this machine's address that they can reach.

        With `nccl`, tensors are on GPUs, one a rank; else gloo takes tensors of any device.
        """
        limit = timedelta(seconds=self.timeout)
        if nccl:
            # Else `wait` returns at once: who hangs is not noticed here, and NCCL's watchdog ends the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._backend = self._checked(lambda: dist.ProcessGroupNCCL(store, self.rank, self.size, options))
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # By default gloo listens at the address of the machine's name, for everybody.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = limit
        self._backend = self._checked(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by the sum of all ranks' `x`, in place, and return it; all ranks get the same bits."""
        self._left -= 1
        self._run("all_reduce", x, lambda: self._backend.allreduce([x]))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace `x` by rank 0's, in place, and return it."""
        self._run("broadcast", x, lambda: self._backend.broadcast([x]))
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return the `x`, all of one shape, of all ranks in their order on rank 0, and None on the others."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run("gather", x, lambda: self._backend.gather([] if parts is None else [parts], [x], options))
        return parts

    @contextmanager
    def all_reduces(self, count: int, like: Callable[[], Tensor]) -> Iterator[None]:
        """Run a block of `count` all-reduces, each of a tensor as `like` makes one, that every rank runs.

        Where the block fails on this rank the others would wait for it: it takes part in what is left of them with NaN,
        so that all come to the end, and whoever reads the sums sees that they are none. Then the error goes on.
        """
        self._left = count
        try:
            yield
        except EngineDeadError:
            raise
        except BaseException:
            while self._left > 0:
                self.all_reduce(like().fill_(torch.nan))
            raise

    def _run(self, name: str, x: Tensor, start: Callable[[], Any]) -> None:
        self._checked(lambda: start().wait())
        self.traffic[name].calls += 1
        self.traffic[name].num_bytes += x.nbytes

    def _checked(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:  # PyTorch has no other type for it
            raise EngineDeadError(
                f"rank {self.rank} of {self.size} lost the other ranks ({_reason(error)}): load the model again."
            ) from error


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message, without the place in its source."""
    return re.sub(r"^\[\S+?:\d+\] ", "", str(error)).partition(". ")[0][:200]
