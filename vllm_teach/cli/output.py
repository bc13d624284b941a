"""What the commands write: standard output, and the JSON file of a measurement."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_teach.errors import InvalidArgumentError


class OutputError(Exception):
    """Standard output cannot be written: its reader is gone (`| head`) or its disk is full. Carries the OSError."""


def write(text: object, end: str = "\n") -> None:
    """Print at once, so that an output that cannot be written shows here and not when Python ends."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        raise OutputError(str(error)) from error


def escape_what_the_terminal_lacks() -> None:
    """Print a character that the terminal's encoding lacks as its number, where Python would raise an error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # no method of a stream that someone put in its place
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send to nowhere what is still in the buffer: Python writes it once more when it ends, and fails again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_json(path: Path, result: dict[str, object]) -> None:
    """Write a measurement's figures; raises InvalidArgumentError when the file cannot be written."""
    with output_file_errors(path):
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def check_output_file(path: Path, option: str = "--json") -> None:
    """Raise InvalidArgumentError, before minutes are spent, when no file can be written there."""
    with output_file_errors(path, option):
        if path.is_dir() or not path.parent.is_dir():
            raise FileNotFoundError("it is a folder, or its folder is not there")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("it is read-only")


@contextmanager
def output_file_errors(path: Path, option: str = "--json") -> Iterator[None]:
    """Raise InvalidArgumentError, which names `option`, for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} is {str(path)!r}, which cannot be written ({error}): give a file."
        ) from error
