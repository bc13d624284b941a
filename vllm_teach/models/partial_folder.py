"""A model folder that takes minutes to make: it grows under another name, can be taken up again, and is there at once.

`out` grows as `out.partial`. A manifest in it says which run writes it and which parts are done; a run with other
settings is refused, the same run goes on behind the last part. Files and folder get their names by renaming, which is
one step for the file system, so what has its name is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_teach.errors import CacheError, InvalidArgumentError, ModelLoadError
from vllm_teach.models.cache import apply_umask

MANIFEST = "quantize.json"
_LOCK = ".lock"
# What a killed process leaves amid a write: under a name of ours, or of safetensors'.
_HALF_WRITTEN = ("*.tmp", ".tmp*")


class PartialFolder:
    """`output` while it is made, to be used in a `with` block: one process at a time holds it.

    `identity` says which run it is, by values that JSON keeps: the settings, the source, the data. On entry the folder
    and its manifest are made, or found. Leaving the block keeps what is there, for another time. `parts` holds what was
    said of each part that is done, in the order in which they were; it stays in the folder, in its manifest.

    Raises InvalidArgumentError when `output` is there already and, on entry, when the unfinished run is another one or
    running right now; ModelLoadError when its manifest is damaged; CacheError when nothing can be written.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        check_output(output)
        self.output = output
        self.path = output.with_name(f"{output.name}.partial")
        self.parts: list[dict[str, Any]] = []
        self._identity = dict(identity)
        self._lock = FileLock(self.path / _LOCK, timeout=0)

    def __enter__(self) -> PartialFolder:
        with self._write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout as error:
                raise InvalidArgumentError(
                    f"output={str(self.output)!r} is being written by another process: wait, or give another folder."
                ) from error
        try:
            self._read_manifest()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def save_part(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write a safetensors file, and then into the manifest that this part is done, with what `about` says of it.

        Raises CacheError when they cannot be written.
        """
        with self._write_errors():
            # One entry: the library writes several in another order each time.
            save_file(dict(tensors), self.path / f"{name}.tmp", metadata={"format": "pt"})
            os.replace(self.path / f"{name}.tmp", self.path / name)
        self.parts.append(dict(about))
        self._write_manifest()

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """Open a safetensors file of the folder. Raises ModelLoadError, saying what to do, when it is damaged."""
        try:
            with safe_open(self.path / name, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{self.path / name} is damaged ({error}): delete {self.path} to start again."
            ) from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` as JSON. Raises CacheError when it cannot be written."""
        with self._write_errors():
            (self.path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def copy(self, file: Path) -> None:
        """Copy `file` into the folder under its own name. Raises CacheError when it cannot be."""
        with self._write_errors():
            (self.path / file.name).write_bytes(file.read_bytes())

    def publish(self) -> None:
        """Give the folder its name, `output`. Raises CacheError when it cannot be renamed."""
        with self._write_errors():
            for left_over in (file for pattern in _HALF_WRITTEN for file in self.path.glob(pattern)):
                left_over.unlink()
            apply_umask(self.path)
            (self.path / _LOCK).unlink(missing_ok=True)
            self.path.rename(self.output)

    def _read_manifest(self) -> None:
        file = self.path / MANIFEST
        if not file.exists():
            if any(entry.name not in (_LOCK, f"{MANIFEST}.tmp") for entry in self.path.iterdir()):
                raise InvalidArgumentError(
                    f"{self.path} is no unfinished run, it has no {MANIFEST}: move it away, or give another output."
                )
            self._write_manifest()
            return
        self.parts = read_parts(self.path, self._identity)

    def _write_manifest(self) -> None:
        self.write_json(f"{MANIFEST}.tmp", {"run": self._identity, "parts": self.parts})
        with self._write_errors():
            os.replace(self.path / f"{MANIFEST}.tmp", self.path / MANIFEST)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CacheError(
                f"output={str(self.output)!r} cannot be written ({error}): make room, or give a folder that can be."
            ) from error


def read_parts(folder: Path, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was said of each part of `folder`, which the run `identity` is making or has made.

    Raises InvalidArgumentError, naming the difference, when it was another run, and ModelLoadError when its manifest is
    damaged.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found, parts = dict(manifest["run"]), [dict(part) for part in manifest["parts"]]
    except FileNotFoundError as error:
        raise InvalidArgumentError(f"{folder} has no {MANIFEST}, so no run made it: give another folder.") from error
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ModelLoadError(f"{file} is damaged ({error!r}): delete {folder} to start again.") from error
    wanted = json.loads(json.dumps(dict(identity)))  # as it comes back from a file
    for name in wanted.keys() | found.keys():
        if wanted.get(name) != found.get(name):
            raise InvalidArgumentError(
                f"{folder} holds a run with {name}={found.get(name)!r}, and this one has {wanted.get(name)!r}: delete "
                "it, or give another output."
            )
    return parts


def check_output(output: Path) -> None:
    """Raise InvalidArgumentError when there is something at `output` already."""
    try:
        output.lstat()
        there = True
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except (OSError, ValueError) as error:  # a name too long or that no file can have, a folder not to be looked into
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(
            f"output={str(output)!r} is no name for a new folder ({reason}): give another one."
        ) from error
    if output.name == "..":  # behind a folder that is not there
        raise InvalidArgumentError(f"output={str(output)!r} is no name for a new folder: give another one.")
    if there:
        raise InvalidArgumentError(f"output={str(output)!r} is there already: give a new folder, or delete it.")
