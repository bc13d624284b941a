"""A training run on disk: written whole or not at all, and taken up again only by the run that wrote it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_teach.errors import CacheError, InvalidArgumentError, ModelLoadError


def save_checkpoint(file: Path, identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, lists and dicts of them) to `file`; a crash leaves the file that was there.

    `identity` says which run it is: the settings and the data, by values that compare with ==. Raises CacheError when
    the file cannot be written.
    """
    partial = file.with_name(f"{file.name}.partial")
    with _write_errors(file):
        try:
            torch.save({"identity": identity, "state": state}, partial)
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)  # still there after an error or an interrupt only


def check_checkpoint(file: Path) -> None:
    """Raise CacheError, before hours are spent, when nothing can be written to `file`; makes its folder."""
    with _write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder")
        if not os.access(file.parent, os.W_OK):
            raise PermissionError(f"{file.parent} is read-only")


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        raise CacheError(f"checkpoint {file} cannot be written ({error}): give a file that can be.") from error


def load_checkpoint(file: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state that was saved in `file`, None where there is no such file.

    Raises InvalidArgumentError, naming the first difference, when another run wrote it, and ModelLoadError when it is
    damaged.
    """
    if not file.exists():
        return None
    with damage_errors(file):
        saved = torch.load(file, weights_only=True)
        found, state = dict(saved["identity"]), dict(saved["state"])
    for name in identity.keys() | found.keys():
        if identity.get(name) != found.get(name):
            raise InvalidArgumentError(
                f"checkpoint {file} is of a run with {name}={found.get(name)!r}, this one has {identity.get(name)!r}: "
                "delete it, or give another file."
            )
    return state


@contextmanager
def damage_errors(file: Path) -> Iterator[None]:
    """Turn what a file with other content than was saved makes PyTorch and Python raise into ModelLoadError."""
    try:
        yield
    except (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        reason = type(error).__name__  # PyTorch's own message is an essay about unsafe loading
        raise ModelLoadError(f"checkpoint {file} is damaged ({reason}): delete it to start again.") from error
