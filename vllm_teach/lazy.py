"""Names that a room re-exports and imports only when they are first used (PEP 562), so that importing stays light."""

from collections.abc import Mapping
from importlib import import_module


def load(room: str, homes: Mapping[str, str], name: str) -> object:
    """Return `name` from its home, a module below the package `room`; AttributeError when `name` has none."""
    if name not in homes:
        raise AttributeError(f"module {room!r} has no attribute {name!r}")
    return getattr(import_module(f"{room}.{homes[name]}"), name)
