"""The ranks that `torchrun` started, on one machine or several: what its environment says.

On each of two machines, with its own number for `--node-rank` (0, which drives, and 1):

    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 1 script.py

where the script makes an `LLM(..., tensor_parallel_size=2)`; or, in place of the script, `-m vllm_teach.cli serve
--tensor-parallel-size 2`, which serves on the first machine. The model must be there on both. Whoever can reach the
ports that the ranks open could take part: use a network of your own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from vllm_teach.errors import EngineDeadError, InvalidArgumentError


@dataclass(frozen=True)
class TorchrunRank:
    """This process as `torchrun` numbers it: among all, and among those of its machine (`local_…`)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str
    port: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> TorchrunRank | None:
        """Return what `torchrun` set, or None where there is nothing. InvalidArgumentError for what cannot be."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        size = _number(environment, "WORLD_SIZE", 1)
        rank = _number(environment, "RANK", 0, size)
        local_size = _number({"LOCAL_WORLD_SIZE": str(size), **environment}, "LOCAL_WORLD_SIZE", 1, size + 1)
        local_rank = _number({"LOCAL_RANK": str(rank), **environment}, "LOCAL_RANK", 0, local_size)
        port = _number(environment, "MASTER_PORT", 1, 2**16)
        return cls(rank, size, local_rank, local_size, environment["MASTER_ADDR"], port)

    def store(self, patience: float) -> dist.Store:
        """Return the store that all ranks have in common. EngineDeadError where it is not there in `patience` seconds.

        Other ranks start when their machines do.
        """
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=patience)))
        except RuntimeError as error:  # PyTorch has no other type for it
            raise EngineDeadError(
                f"rank {self.rank} of {self.size} found no other ranks at {self.master}, port {self.port}: check "
                "--master-addr and --master-port, and that torchrun runs on every machine."
            ) from error
        return dist.PrefixStore("vllm_teach", store)

    def host(self) -> str:
        """Return the address at which the other machines reach this one: VLLM_TEACH_HOST_IP.

        Without that variable, it is the one from which this machine reaches the master.
        """
        chosen = os.environ.get("VLLM_TEACH_HOST_IP")
        if chosen:
            return chosen
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:  # of datagrams: nothing is sent
                probe.connect(address)
                return probe.getsockname()[0]
        except OSError as error:
            raise InvalidArgumentError(
                f"MASTER_ADDR={self.master!r} in the environment cannot be reached ({error}): check --master-addr, or "
                "set VLLM_TEACH_HOST_IP to this machine's own address."
            ) from error


def _number(environment: Mapping[str, str], name: str, least: int, end: int | None = None) -> int:
    """Return the whole number that `name` says, from `least` to below `end`."""
    value = environment[name]
    try:
        number = int(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name}={value!r} in the environment is no whole number: start with torchrun, or unset it."
        ) from error
    if number < least or (end is not None and number >= end):
        to = "on" if end is None else f"to {end - 1}"
        raise InvalidArgumentError(
            f"{name}={value!r} in the environment is not from {least} {to}: start with torchrun, or unset it."
        )
    return number
