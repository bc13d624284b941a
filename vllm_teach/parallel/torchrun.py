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

from vllm_teach.errors import InvalidArgumentError

# The others may load a large model meanwhile.
_MEETING = timedelta(minutes=30)


@dataclass(frozen=True)
class TorchrunRank:
    """This process as `torchrun` numbers it: among all, and among those of its machine (`local_…`)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> TorchrunRank | None:
        """Return what `torchrun` set, or None where there is nothing. InvalidArgumentError for what is no number."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK", rank)
        return cls(rank, size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", size), environment["MASTER_ADDR"])

    def store(self) -> dist.Store:
        """Return the store that all ranks have in common; waits for it."""
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=_MEETING))
        return dist.PrefixStore("vllm_teach", store)

    def host(self) -> str:
        """Return the address at which the other machines reach this one: VLLM_TEACH_HOST_IP.

        Without that variable, it is the one from which this machine reaches the master.
        """
        chosen = os.environ.get("VLLM_TEACH_HOST_IP")
        if chosen:
            return chosen
        family, kind, protocol, _, address = socket.getaddrinfo(self.master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # of datagrams: nothing is sent
            probe.connect(address)
            return probe.getsockname()[0]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name}={value!r} in the environment is no whole number: start with torchrun, or unset it."
        ) from error
