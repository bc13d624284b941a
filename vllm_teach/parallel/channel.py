"""What rank 0 says to the other ranks, and what they answer: Python objects over a process group."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from vllm_teach.errors import EngineDeadError
from vllm_teach.parallel.group import Group

# Of the first part of a message; what is longer has a second part. A step of a few sequences fits.
_HEAD_BYTES = 4 << 10
_LENGTH_BYTES = 8
_ANSWER_BYTES = 8 << 10
# A rank may wait for work as long as its driver lives, whose end closes the connection.
FOREVER = 10 * 365 * 86400.0


class Channel:
    """Messages from rank 0 to all others, in their order, and answers back. Only for ranks that trust each other.

    `group` is the channel's own, so that no tensor comes in between.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def tell(self, message: object) -> None:
        """Send `message`, which can be pickled, to all ranks; called by rank 0."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        head = bytearray(_HEAD_BYTES)
        head[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        room = _HEAD_BYTES - _LENGTH_BYTES
        head[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data[:room]
        self._group.broadcast(torch.frombuffer(head[:_HEAD_BYTES], dtype=torch.uint8))
        if len(data) > room:
            self._group.broadcast(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8))

    def listen(self) -> Any:
        """Return the next message; called by all but rank 0. Waits for it as long as rank 0 lives."""
        head = self._group.broadcast(torch.empty(_HEAD_BYTES, dtype=torch.uint8)).numpy().tobytes()
        length, room = int.from_bytes(head[:_LENGTH_BYTES], "little"), _HEAD_BYTES - _LENGTH_BYTES
        data = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > room:
            data += self._group.broadcast(torch.empty(length - room, dtype=torch.uint8)).numpy().tobytes()
        return pickle.loads(data)

    def ask(self, message: object) -> list[str]:
        """Send `message` and return the answer of each rank but this one, in their order; called by rank 0."""
        self.tell(message)
        answers = self._group.gather(torch.zeros(_ANSWER_BYTES, dtype=torch.uint8))
        if answers is None:
            raise EngineDeadError(f"rank {self._group.rank} cannot ask, as rank 0 does: answer instead.")
        return [bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in answers[1:]]

    def answer(self, text: str) -> None:
        """Answer what was asked, in a few thousand characters; called by all but rank 0."""
        data = text.encode()[:_ANSWER_BYTES]
        self._group.gather(torch.frombuffer(bytearray(data.ljust(_ANSWER_BYTES, b"\0")), dtype=torch.uint8))
