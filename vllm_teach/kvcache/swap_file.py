"""The swap file: a file of the caller's, mapped into memory, that one storage at a time may overwrite."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from vllm_teach.errors import InvalidArgumentError


class SwapFile:
    """The file `path`, made `num_bytes` long and mapped as `bytes`. What was in it is lost; the file itself stays.

    Two storages in one file would bring back each other's keys and values. So it is locked while this object lives, for
    other processes too, by a lock file beside it (`.lock` behind its name), which stays as well. A symbolic link stands
    for the file that it leads to.

    Raises InvalidArgumentError when the file is locked, cannot be made that long, or is a folder, a device or a pipe.
    """

    def __init__(self, path: str | Path, num_bytes: int) -> None:
        try:
            file = _plain_file(path)
            self._lock = _lock(file)
        except Timeout as error:
            raise InvalidArgumentError(
                f"swap_file={str(path)!r} is in use by another engine, here or in another process: name another file, "
                "or delete that engine first."
            ) from error
        except OSError as error:
            raise _refusal(path, num_bytes, error) from error
        try:
            self.bytes = _map(file, num_bytes)
        except (OSError, OverflowError) as error:
            self._lock.release()  # who keeps the error keeps this object
            raise _refusal(path, num_bytes, error) from error


def _plain_file(path: str | Path) -> Path:
    """Return the path of the file itself, there or not. To open a pipe would wait for its reader, maybe for ever."""
    try:
        file = Path(os.path.realpath(path))
        plain = file.is_file() or not file.exists()
    except ValueError as error:  # a null character, half of a surrogate pair
        raise InvalidArgumentError(
            f"swap_file={str(path)!r} is no name that a file can have ({error}): name another one."
        ) from error
    if not plain:
        raise InvalidArgumentError(
            f"swap_file={str(path)!r} is a folder, a device or a pipe: name a file, which need not be there yet."
        )
    return file


def _lock(file: Path) -> FileLock:
    """Return a lock on `file`, held. Raises Timeout when somebody else holds it, OSError where there is no folder."""
    file.parent.stat()  # FileLock would make the folder
    # Of no thread in particular: the garbage collector may find the engine in any.
    lock = FileLock(f"{file}.lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        gc.collect()  # an engine's parts refer to each other, so one that nobody uses may still be there
        lock.acquire()
    return lock


def _map(file: Path, num_bytes: int) -> mmap.mmap:
    with file.open("wb+") as opened:
        _take_room(opened, num_bytes)
        return mmap.mmap(opened.fileno(), num_bytes)


def _take_room(file: BinaryIO, num_bytes: int) -> None:
    """Make `file` that long, its room on the disk taken now: to write to a map of a full disk kills the process."""
    if not hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        file.truncate(num_bytes)
        return
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError:
        file.truncate(0)  # it may have taken all that was left
        raise


def _refusal(path: str | Path, num_bytes: int, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"swap_file={str(path)!r} cannot be made {num_bytes} bytes large ({error}): name a file in a folder with room, "
        "or lower swap_space."
    )
