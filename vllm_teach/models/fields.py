"""Named values from a model's files, each checked where it is read.

A damaged file then costs its reader one sentence that names file and entry, not an error of Python's far from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm_teach.errors import ModelLoadError

T = TypeVar("T")

# No size in a decoder's config comes near it, and three of them multiplied still count bytes in 64 bits.
_LARGEST = 2**20


class Fields:
    """The entries of one JSON object or GGUF header; `source` is how errors name it. A null counts as absent.

    Each reader returns the value of `key`, or `default` where it is absent. It raises ModelLoadError, naming source,
    key and value, for a value of another kind and where there is neither value nor default.
    """

    def __init__(self, values: object, source: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelLoadError(
                f"{source} is of type {type(values).__name__} where named values are needed: check it or download the "
                "model again."
            )
        self.values: Mapping[str, Any] = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _LARGEST) -> int:
        """Return a whole number in [minimum, maximum]."""
        value = self._value(key, default)
        if not is_whole(value) or not minimum <= value <= maximum:
            raise self.refusal(key, f"a whole number from {minimum} to {maximum}", value)
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self._value(key, default)
        if not (is_whole(value) or isinstance(value, float)) or not 0 < value <= sys.float_info.max:
            raise self.refusal(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a text", value)
        return value

    def items(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """Return a list whose items are all of type `kind`."""
        value = self._value(key, default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.refusal(key, f"a list of {kind.__name__}", value)
        return value

    def section(self, key: str) -> Fields:
        """Return the object inside this one under `key`, empty where it is absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object of named values", value)
        return Fields(value, f"{self.source} ({key})")

    def refusal(self, key: str, needed: str, value: object = None) -> ModelLoadError:
        """Return the error for a value that is not what is needed; `value` where it is not simply the entry."""
        shown = repr(self.values.get(key) if value is None else value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        return ModelLoadError(
            f"{self.source} has {key} = {shown} where {needed} is needed: check it or download the model again."
        )

    def _value(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def is_whole(value: object) -> bool:
    """Return whether `value` is a whole number; True and False, which Python counts as 1 and 0, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(file: Path) -> Fields:
    """Return the entries of a JSON file. Raises ModelLoadError when it is absent, damaged or holds no object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    # ValueError: no JSON or no UTF-8; RecursionError: brackets nested thousands deep.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON ({error}): download it again.") from error
    return Fields(values, str(file))
