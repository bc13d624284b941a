"""What the KV cache did, as events. Who holds which block at any time follows from them (`Allocated` to `Moved`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` of the `num_queried` tokens of a sequence were computed already, for another one.

    Recorded when a prompt is looked up for the first time, not when it is recomputed after a preemption.
    """

    seq_id: int
    num_tokens: int
    num_queried: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """`blocks`, which were free, are in the sequence's table now, in this order; those held in reserve are not told."""

    seq_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """`blocks`, which hold content already, are in the sequence's table now, by a prefix hit, a fork or an adoption."""

    seq_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """`blocks` are in the sequence's table no more; others may hold them, or a prefix cache keep them."""

    seq_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Copy on write: the sequence writes to `destination` from now on, a copy of `source`, which others need as it is.

    Told beside `Allocated` of the destination and `Freed` of the source.
    """

    seq_id: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Compaction: what was in block a is in block b now, for all `pairs` (a, b) at once, in every table."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """The prefix cache gave up `blocks`, which no table held: they are free."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """All `num_blocks` blocks of a sequence were copied to the host; told beside `Freed` of them."""

    seq_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """All `num_blocks` blocks of a sequence came back from the host; told beside `Allocated` of the new ones."""

    seq_id: int
    num_blocks: int


CacheEvent = PrefixHit | Allocated | Shared | Freed | Copied | Moved | Evicted | SwappedOut | SwappedIn
