"""Rank 0's hold on the other ranks of a tensor-parallel engine: it starts them, tells them what to do, ends them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.failure import is_out_of_memory
from vllm_teach.engine.rank_messages import Stop, WhatFailed
from vllm_teach.engine.rank_worker import RankJob, serve
from vllm_teach.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    OutOfMemoryError,
    VllmTeachError,
)
from vllm_teach.models.sharded_decoder import ShardedDecoder
from vllm_teach.parallel.channel import Channel
from vllm_teach.parallel.meeting import PATIENCE, excuse
from vllm_teach.parallel.thread_share import SHARES
from vllm_teach.parallel.torchrun import TorchrunRank
from vllm_teach.parallel.worker_processes import WorkerProcesses


class Ranks:
    """The other ranks, as rank 0 sees them: child processes, or what `torchrun` started, here or elsewhere.

    `part` is this rank's part of the model, `group` its group; `num_sharing` ranks, this one included, have one memory.
    `end` ends the others: it is called once, at the latest when this object is collected. Whoever finds that a rank is
    gone calls `mourn`; from then on every `check` raises EngineDeadError.
    """

    def __init__(
        self,
        part: ShardedDecoder,
        channel: Channel,
        processes: WorkerProcesses | None,
        num_sharing: int,
        end: Callable[[], object],
    ) -> None:
        self.part, self.group, self.processes, self.num_sharing = part, part.group, processes, num_sharing
        self._channel = channel
        self._dead: str | None = None
        self._end = weakref.finalize(self, end)

    def tell(self, message: object) -> None:
        """Send `message` to all other ranks. Raises EngineDeadError when one is gone."""
        self._channel.tell(message)

    def demand(self, message: object, failure: Callable[[str], VllmTeachError]) -> None:
        """Send `message`, and raise `failure(answer)` for the first rank that answers that something went wrong."""
        for answer in self._channel.ask(message):
            if answer:
                raise failure(answer)

    def check_last_pass(self) -> None:
        """Raise EngineError if what failed in the last pass failed on another rank, whose NaN came to this one."""
        self.demand(WhatFailed(), _pass_failed)

    def check(self) -> None:
        """Raise EngineDeadError when a rank is known to be gone, as a child is that has ended."""
        found = None if self.processes is None or self._dead is not None else self.processes.ended()
        if found is not None:
            self._bury(str(found))
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def mourn(self, error: EngineDeadError) -> EngineDeadError:
        """Return the error to raise instead of `error`, which found the others gone: it names who died, if one did.

        Ends what is left of them.
        """
        # Its connections closed a moment before the process was gone.
        found = None if self.processes is None else self.processes.ended(wait=1.0)
        self._bury(str(found or error))
        return EngineDeadError(str(found or error))

    def when_one_dies(self, action: Callable[[], None]) -> None:
        """Call `action`, in a thread of its own, when a child ends unbidden; what `torchrun` started tells nothing."""
        if self.processes is not None:
            self.processes.when_one_ends(action)

    def close(self) -> None:
        """End the other ranks. Can be called twice."""
        if self._dead is None:
            self._bury("this LLM was closed: load the model again.")

    def _bury(self, reason: str) -> None:
        self._dead = reason
        self._end()


def _pass_failed(answer: str) -> EngineError:
    no_memory = answer.startswith("MemoryError") or is_out_of_memory(RuntimeError(answer))
    kind = OutOfMemoryError if no_memory else EngineError
    return kind(f"the model's forward pass failed ({answer}): send the request again, or fewer at once.")


def _dismiss(channel: Channel, owner: int) -> None:
    """Tell the ranks that torchrun started to end, unless this is a fork of the process that has them."""
    if os.getpid() == owner:
        with contextlib.suppress(EngineDeadError):
            channel.tell(Stop())


@contextlib.contextmanager
def excused(size: int) -> Iterator[None]:
    """Tell what fails in the block to the other ranks, if torchrun started `size` of them: they would wait for long."""
    try:
        yield
    except BaseException as error:
        started = TorchrunRank.find()
        if size > 1 and started is not None and started.size == size:
            excuse(started.store(PATIENCE), started.rank, error)
        raise


def load_over_ranks(
    path: Path, size: int, dtype: torch.dtype, device: torch.device, config: EngineConfig, timeout: float
) -> tuple[ShardedDecoder, Ranks]:
    """Return this rank's part of the model in `path` and its hold on the others, which have theirs.

    Under `torchrun` with as many ranks, these are taken: on rank 0 the function returns, on the others it serves until
    rank 0 is done and ends the process (SystemExit). Otherwise child processes are started. On a CPU they and this
    process share PyTorch's threads evenly.

    Raises what `load_shard` raises on any rank, InvalidArgumentError where `torchrun` started another number of ranks,
    or they do not fit together, or `config` cannot be sent to a process, and EngineDeadError for a rank that died or
    has not loaded its part in `PATIENCE` seconds.
    """
    job = RankJob(path, size, dtype, device, config, timeout)
    started = TorchrunRank.find()
    return _start(job) if started is None else _join(job, started)


def _start(job: RankJob) -> tuple[ShardedDecoder, Ranks]:
    others = range(1, job.size)
    # Where the ranks find one another: in a folder of this user's own, and not at an open port.
    with tempfile.TemporaryDirectory(prefix="vllm-teach-ranks-") as folder, contextlib.ExitStack() as undo:
        if job.device.type == "cpu":
            job = replace(job, num_threads=SHARES.take(job.size))
            undo.callback(SHARES.give_back)
        store = str(Path(folder) / "store")
        processes = WorkerProcesses(
            "vllm_teach.engine.rank_worker:work",
            [f"the worker of rank {rank}" for rank in others],
            [(job, rank, store) for rank in others],
            {} if job.num_threads is None else {"OMP_NUM_THREADS": str(job.num_threads)},
        )
        undo.callback(processes.stop)
        try:
            model = job.load(0, 0, job.size)
            processes.wait_until_ready(PATIENCE)
            channel = job.connect(model, dist.FileStore(store, job.size), "127.0.0.1", job.size, job.timeout)
        except EngineDeadError as error:
            died = processes.ended(wait=1.0)
            if died is not None:
                raise died from error
            raise
        end = undo.pop_all().close
    return model, Ranks(model, channel, processes, 1 if job.has_gpu_each(job.size) else job.size, end)


def _join(job: RankJob, started: TorchrunRank) -> tuple[ShardedDecoder, Ranks]:
    if started.size != job.size:
        raise InvalidArgumentError(
            f"tensor_parallel_size={job.size} is not the number of ranks that torchrun started, {started.size}: make "
            "them equal."
        )
    with excused(job.size):
        host = started.host()
        model = job.load(started.rank, started.local_rank, started.local_size)
    channel = job.connect(model, started.store(PATIENCE), host, started.local_size)
    if started.rank:
        serve(model, job.config, channel)
        raise SystemExit(0)
    num_sharing = 1 if job.has_gpu_each(started.local_size) else started.local_size
    return model, Ranks(model, channel, None, num_sharing, partial(_dismiss, channel, os.getpid()))
