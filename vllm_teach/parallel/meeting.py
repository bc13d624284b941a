"""Where ranks meet before they connect: each says in a store what it has loaded, or why it will not come."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist

from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.parallel.told_errors import tell_error, told_error

# Seconds in which a rank must have loaded its part: the other ones', which wait for it, may be there long before.
PATIENCE = 1800.0

_LOADED, _EXCUSE = "loaded ", "excuse "


def meet(store: dist.Store, rank: int, size: int, loaded: str, patience: float) -> None:
    """Say in `store` what this rank has `loaded`, and wait, `patience` seconds at most, until the others have said it.

    Raises what another one's excuse says, InvalidArgumentError where one has loaded something else than this one or the
    store has seen a meeting before, and EngineDeadError for a rank that says nothing.
    """
    if store.check([_key(rank)]):
        raise InvalidArgumentError(
            f"tensor_parallel_size={size} was asked for before, and torchrun's ranks serve one LLM: start the next by "
            "a torchrun of its own."
        )
    store.set(_key(rank), _LOADED + loaded)
    for other in range(size):
        try:
            store.wait([_key(other)], timedelta(seconds=patience))
            said = store.get(_key(other)).decode()
        except RuntimeError as error:  # PyTorch has no other type for it
            raise EngineDeadError(
                f"rank {rank} of {size} heard nothing of rank {other} in {patience:g} s: see what that one says."
            ) from error
        if said.startswith(_EXCUSE):
            raise told_error(f"rank {other}", said.removeprefix(_EXCUSE))
        if said != _LOADED + loaded:
            raise InvalidArgumentError(
                f"rank {other} has {said.removeprefix(_LOADED)}, and rank {rank} has {loaded}: give all ranks the same "
                "model, dtype and kind of device."
            )


def excuse(store: dist.Store, rank: int, error: BaseException) -> None:
    """Say that `error` keeps this rank from coming."""
    with contextlib.suppress(RuntimeError):  # there is nobody any more to hear it
        store.set(_key(rank), _EXCUSE + tell_error(error))


def _key(rank: int) -> str:
    return f"rank {rank}"
