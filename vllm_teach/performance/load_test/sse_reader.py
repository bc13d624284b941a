"""Server-sent events out of a stream of bytes, wherever the network has cut it.

Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream"; only the `data` field matters here.
"""

from __future__ import annotations

import re

from vllm_teach.errors import VllmTeachError

LONGEST_EVENT = 8 * 2**20  # bytes

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(VllmTeachError):
    """A server sent so long an event that it would fill this client's memory."""


class SSEReader:
    """Takes the bytes as they come, and gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # of an event whose end has not come
        self._size = 0
        self._started = self._after_return = False

    def feed(self, data: bytes) -> list[str]:
        """Return the data of the events that `data` completes. Raises EventTooLongError above `LONGEST_EVENT`."""
        if not data:
            return []
        if self._after_return and data.startswith(b"\n"):  # the other half of a line end that was cut in two
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + data)
        events = []
        for line in lines:
            if not self._started:
                self._started, line = True, line.removeprefix(_BYTE_ORDER_MARK)
            event = self._take(line)
            if event is not None:
                events.append(event)
        if len(self._rest) + self._size > LONGEST_EVENT:
            raise EventTooLongError(f"an event has more than {LONGEST_EVENT} bytes: the server does not end it.")
        return events

    def _take(self, line: bytes) -> str | None:
        """Take a whole line; return the event's data when the line is the empty one that ends an event."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value) + 1  # with its line end: an event of many empty lines is long, too
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data).decode("utf-8", errors="replace")
        self._data, self._size = [], 0
        return event
