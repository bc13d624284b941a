"""A training run on disk: written whole or not at all, and taken up again only by the run that wrote it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from vllm_teach.errors import InvalidArgumentError, ModelLoadError


def save_checkpoint(file: Path, identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, lists and dicts of them) to `file`; a crash leaves the file that was there.

    `identity` says which run it is: the settings and the data, by values that compare with ==.
    """
    partial = file.with_name(f"{file.name}.partial")
    torch.save({"identity": identity, "state": state}, partial)
    os.replace(partial, file)


def load_checkpoint(file: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state that was saved in `file`, None where there is no such file.

    Raises InvalidArgumentError, naming the first difference, when another run wrote it, and ModelLoadError when it is
    damaged.
    """
    if not file.exists():
        return None
    try:
        saved = torch.load(file, weights_only=True)
        found, state = saved["identity"], saved["state"]
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = type(error).__name__  # PyTorch's own message is an essay about unsafe loading
        raise ModelLoadError(f"checkpoint {file} is damaged ({reason}): delete it to start again.") from error
    for name in identity.keys() | found.keys():
        if identity.get(name) != found.get(name):
            raise InvalidArgumentError(
                f"checkpoint {file} is of a run with {name}={found.get(name)!r}, this one has {identity.get(name)!r}: "
                "delete it, or give another file."
            )
    return state
