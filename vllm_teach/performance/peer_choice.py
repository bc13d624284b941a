"""Which systems a benchmark compares with: those that can run here, and the others, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.peer_process.client import SYSTEMS, ProcessPeer
from vllm_teach.performance.peers import TransformersPeer

PEERS = ("transformers", *SYSTEMS)


@dataclass(frozen=True)
class MissingPeer:
    """A system that was asked for and has no figures, and why, as a sentence."""

    system: str
    reason: str


def choose_peers(
    names: Sequence[str], model_path: Path, dtype: torch.dtype, pythons: Mapping[str, str] | None = None
) -> tuple[list[TransformersPeer | ProcessPeer], list[MissingPeer]]:
    """Return the peers of these names that can run here, not loaded yet, and those that cannot.

    `pythons` names the interpreter of a peer that this one does not have. Raises InvalidArgumentError for an unknown
    name, and for the interpreter of a peer that is not asked for or that runs in this one.
    """
    check_peers(names, pythons)
    pythons = pythons or {}
    peers: list[TransformersPeer | ProcessPeer] = []
    missing = []
    for name in dict.fromkeys(names):
        peer: TransformersPeer | ProcessPeer
        if name in SYSTEMS:
            interpreter = {"python": pythons[name]} if name in pythons else {}
            peer = ProcessPeer(name, model_path, dtype, **interpreter)
        else:
            peer = TransformersPeer(model_path, dtype)
        reason = peer.available()
        if reason is None:
            peers.append(peer)
        else:
            missing.append(MissingPeer(name, reason))
    return peers, missing


def check_peers(names: Sequence[str], pythons: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgumentError for what `choose_peers` cannot choose from; looks at nothing but the names."""
    for name in names:
        if name not in PEERS:
            raise InvalidArgumentError(
                f"compare={name!r} is no system to compare with: use some of {', '.join(PEERS)}, or none."
            )
    for name in pythons or {}:
        if name not in SYSTEMS or name not in names:
            raise InvalidArgumentError(
                f"peer_pythons has {name!r}, which is no system in a process of its own that compare names, too: use "
                f"one of {', '.join(SYSTEMS)}, and compare with it."
            )
