"""Names of requests."""

from __future__ import annotations

import itertools
import secrets

_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def new_id(kind: str) -> str:
    """Return a name that no other request has, here or at another replica: `kind`, a dash and 32 hexadecimal digits.

    A random part of the process and a number: random ones for each request are a system call each, which lets go of
    Python's lock, and a busy event loop would wait milliseconds to get it back.
    """
    return f"{kind}-{_PROCESS}{next(_numbers):016x}"
