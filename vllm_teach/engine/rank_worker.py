"""A rank other than 0: it has its part of the weights and of the cache, and computes what rank 0 tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_teach.engine.assembly import make_storage
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.failure import shown
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.rank_messages import Forward, Logits, MakeCache, Stop, WhatFailed
from vllm_teach.errors import EngineDeadError
from vllm_teach.models.load import load_shard
from vllm_teach.models.sharded_decoder import ShardedDecoder
from vllm_teach.parallel.channel import FOREVER, Channel
from vllm_teach.parallel.group import Group
from vllm_teach.parallel.meeting import PATIENCE, meet


@dataclass(frozen=True)
class RankJob:
    """What every rank needs to load its part. `device` is one for all, or "cuda" where each has a GPU of its own.

    A rank waits at most `timeout` seconds for the others. `num_threads` is how many threads it computes in, None for
    PyTorch's own choice.
    """

    path: Path
    size: int
    dtype: torch.dtype
    device: torch.device
    config: EngineConfig
    timeout: float
    num_threads: int | None = None

    def load(self, rank: int, local_rank: int, local_size: int) -> ShardedDecoder:
        """Return the part of the model that `rank` has; `local_…` count those of its machine."""
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        device = self.device
        if self.has_gpu_each(local_size):
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        return load_shard(self.path, Group(rank, self.size, self.timeout), self.dtype, device)

    def connect(
        self, model: ShardedDecoder, store: dist.Store, host: str, local_size: int, patience: float = PATIENCE
    ) -> Channel:
        """Connect the group of `model` with the other ranks', and return the channel for messages beside it.

        Waits `patience` seconds for those that still load, and raises what `meet` does.
        """
        group, nccl = model.group, self.has_gpu_each(local_size)
        shape, transport = model.shard.whole, "NCCL" if nccl else "gloo"
        loaded = f"{shape.architecture} of {shape.num_layers} x {shape.hidden_size} in {model.dtype} over {transport}"
        meet(store, group.rank, group.size, loaded, patience)
        group.connect(dist.PrefixStore("tensors", store), host, nccl=nccl)
        messages = Group(group.rank, group.size, self.timeout if group.rank == 0 else FOREVER)
        messages.connect(dist.PrefixStore("messages", store), host, patience=self.timeout)
        messages.all_reduce(torch.zeros(1))  # then all have met, and the store may go
        return Channel(messages)

    def has_gpu_each(self, local_size: int) -> bool:
        """Whether each of the `local_size` ranks of this machine has a GPU of its own; else they share one, or none."""
        return self.device.type == "cuda" and torch.cuda.device_count() >= local_size


def work(ready: Callable[[], None], job: RankJob, rank: int, store: str) -> None:
    """Load this rank's part of the model, say so, and serve; all ranks are on this machine and meet in a file.

    Raises EngineDeadError when the others are gone.
    """
    model = job.load(rank, rank, job.size)
    ready()
    serve(model, job.config, job.connect(model, dist.FileStore(store, job.size), "127.0.0.1", job.size))


def serve(model: ShardedDecoder, config: EngineConfig, channel: Channel) -> None:
    """Do what rank 0 says, until it says `Stop`. Raises EngineDeadError when it is gone, and what a transfer raises."""
    worker = _RankWorker(model, config)
    while True:
        match channel.listen():
            case MakeCache() as message:
                channel.answer(worker.make_cache(message))
            case Forward() as message:
                worker.forward(message)
            case Logits(num_rows):
                worker.logits(num_rows)
            case WhatFailed():
                channel.answer(worker.failure)
            case Stop():
                return


class _RankWorker:
    """What the messages ask for. `failure` says what went wrong since the last forward pass began."""

    def __init__(self, model: ShardedDecoder, config: EngineConfig) -> None:
        self._model, self._group = model, model.group
        own_file = None if config.swap_file is None else f"{config.swap_file}.rank{self._group.rank}"
        self._config = replace(config, swap_file=own_file)
        self.failure = ""

    def make_cache(self, message: MakeCache) -> str:
        """Make cache and runner; return why they could not be made, or nothing."""
        with self._kept():
            config = self._config
            storage = make_storage(config, self._model, message.num_blocks, message.num_host_blocks)
            self._runner = ModelRunner(self._model, storage, config.attention_backend, config.attention_pattern)
        return self.failure

    @torch.inference_mode()
    def forward(self, message: Forward) -> None:
        """Apply the transfers and take part in the pass. What a transfer raises is the end: blocks would be wrong."""
        self._runner.storage.apply(message.transfers)
        self.failure = ""
        with self._kept(), self._model.in_step(len(message.token_ids)):
            self._runner.forward(message.batch(self._model.device))

    @torch.inference_mode()
    def logits(self, num_rows: int) -> None:
        """Take part in the logits of rank 0's hidden states."""
        shape = (num_rows, self._model.config.hidden_size)
        hidden = self._group.broadcast(torch.empty(shape, dtype=self._model.dtype, device=self._model.device))
        with self._kept():
            self._model.logits(hidden)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the first error of the block for rank 0 to ask for, unless the others are gone: nobody would ask."""
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            self.failure = self.failure or f"{shown(error, 1000)} on rank {self._group.rank}"
