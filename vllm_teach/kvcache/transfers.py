"""What the bookkeeping asks the storage to do: copies of whole blocks, within the cache or to and from the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy", "move", "swap_out", "swap_in"]


@dataclass(frozen=True)
class Transfer:
    """Blocks to be copied together: each of `pairs` is (source, destination), both physical blocks.

    "copy" is a copy-on-write, "move" a step of compaction; both stay within the cache. "swap_out" goes from the cache
    to a block of the host's swap space, "swap_in" back. All sources are read before any destination is written, so the
    moves of one transfer may overlap; transfers take place in their order, before the step's tokens are computed.
    """

    kind: Kind
    pairs: tuple[tuple[int, int], ...]


class TransferList:
    """Collects transfers in the order of the bookkeeping, which is the order in which they have to take place.

    That order is what keeps content safe: a block that is freed, taken and written again between two steps is read by
    the transfer that was recorded first. So a block need not be kept back until it has been read. Neighbours of one
    kind become one transfer where no block that either writes is read or written by the other.
    """

    def __init__(self) -> None:
        self._transfers: list[tuple[Kind, list[tuple[int, int]]]] = []
        # Of the last transfer: what it reads and writes. Host blocks count apart from the cache's.
        self._reads: set[tuple[str, int]] = set()
        self._writes: set[tuple[str, int]] = set()

    def record(self, kind: Kind, pairs: Iterable[tuple[int, int]]) -> None:
        """Append a transfer of `pairs`; nothing if there are none."""
        new = list(pairs)
        if not new:
            return
        source, destination = ("host" if kind == "swap_in" else "cache"), ("host" if kind == "swap_out" else "cache")
        reads = {(source, a) for a, _ in new}
        writes = {(destination, b) for _, b in new}
        last = self._transfers[-1][0] if self._transfers else None
        if last == kind and not writes & (self._reads | self._writes) and not reads & self._writes:
            self._transfers[-1][1].extend(new)
            self._reads |= reads
            self._writes |= writes
        else:
            self._transfers.append((kind, new))
            self._reads, self._writes = reads, writes

    def take(self) -> tuple[Transfer, ...]:
        """Return what was recorded since the last call."""
        taken = tuple(Transfer(kind, tuple(pairs)) for kind, pairs in self._transfers)
        self._transfers.clear()
        return taken
