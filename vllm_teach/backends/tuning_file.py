"""Where the timings of `vllm-teach tune` are kept: a file for each machine, named by all that a timing depends on."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_teach.backends.hardware import cpu_name, detect_cpu_isa
from vllm_teach.backends.measured import Measurements
from vllm_teach.errors import CacheError, InvalidArgumentError
from vllm_teach.kernels.cpu_build import cache_folder
from vllm_teach.version import __version__

_FORMAT = "1"  # of the file: another one is not read


def describe_machine(device: str) -> dict[str, str]:
    """Return what timings on `device` depend on, as words: processor, instructions and threads, or the GPU; PyTorch.

    Raises InvalidArgumentError unless `device` is "cpu", or "cuda" on a machine with a GPU.
    """
    if device not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {device!r}, where nothing can be timed; use 'cpu' or 'cuda'.")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgumentError("device is 'cuda', and PyTorch sees no CUDA GPU on this machine; use 'cpu'.")
        return {"processor": torch.cuda.get_device_name(), "torch": f"torch {torch.__version__}"}
    threads = torch.get_num_threads()
    return {
        "processor": cpu_name(),
        "instructions": " ".join(sorted(detect_cpu_isa())) or "no vector instructions",
        "threads": f"{threads} thread{'s' * (threads != 1)}",
        "torch": f"torch {torch.__version__}",
    }


def tuning_file(device: str) -> Path:
    """Return where the timings of this machine are kept.

    Another processor, number of threads, version of PyTorch or of this package has another file. Raises as
    `describe_machine`, and CacheError when VLLM_TEACH_HOME names the home of a user that is not there.
    """
    machine = describe_machine(device)
    key = hashlib.sha256("\0".join([_FORMAT, __version__, device, *machine.values()]).encode()).hexdigest()[:16]
    home = cache_folder().parent
    if str(home).startswith("~"):
        raise CacheError(f"VLLM_TEACH_HOME is {str(home)!r}, and there is no such user; set it to a folder.")
    return home / "tuning" / f"{device}-{key}.json"


def load_measurements(device: str) -> Measurements:
    """Return what was measured on this machine, for `device` ("cpu" or "cuda") and the present number of threads.

    Raises InvalidArgumentError when nothing was, and CacheError when the file cannot be read, is damaged, or was
    recorded on another machine.
    """
    path, machine = tuning_file(device), describe_machine(device)
    words = ", ".join(machine.values())
    try:
        found = _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"policy is 'measured', and nothing was measured on this machine ({words}); run vllm-teach tune first."
        ) from None
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error}); set VLLM_TEACH_HOME to a folder that can.") from error
    if found.machine != machine:
        raise CacheError(f"{path} was recorded on another machine than this one ({words}); run vllm-teach tune.")
    return found


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> Measurements:
    try:
        return Measurements.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path} is no record of vllm-teach tune; run vllm-teach tune to write it anew.") from error


def make_folder(path: Path) -> None:
    """Make the folder that `path` shall lie in. Raises CacheError when nothing can be written there."""
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} is read-only")


class _Record(Protocol):
    def to_json(self) -> dict[str, Any]: ...


def save_measurements(found: _Record, path: Path) -> None:
    """Write the file whole or not at all: neither a reader in another process nor an interrupt leaves half of it.

    Raises CacheError when it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    with _write_errors(path):
        make_folder(path)
        try:
            partial.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # still there after an error or an interrupt only


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(f"{path} cannot be written ({error}); set VLLM_TEACH_HOME to a folder that can.") from error
