"""Whether a server on this machine works, as those ask who start it."""

from __future__ import annotations

import asyncio
from enum import Enum


class Health(Enum):
    """What a server says of itself: that it works, that it does not, or nothing."""

    WELL = "well"
    ILL = "ill"
    SILENT = "silent"


async def ask_health(port: int, seconds: float = 10.0) -> Health:
    """Ask `GET /health` of 127.0.0.1: 200 is WELL, another status ILL, no answer in so many seconds SILENT."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                answer = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, ValueError):  # ValueError: a line without end
        return Health.SILENT
    if len(answer) < 2 or not answer[0].startswith(b"HTTP/"):
        return Health.SILENT
    return Health.WELL if answer[1] == b"200" else Health.ILL
