"""What an index of computed prefixes offers: whose prompt begins like an earlier text starts from its blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_teach.kvcache.block_pool import BlockPool

# (start, count) -> the tokens of a sequence at positions start to start + count - 1.
Tokens = Callable[[int, int], Sequence[int]]


def tokens_of(token_ids: Sequence[int]) -> Tokens:
    """Return how the caches read `token_ids`, where they are in one list."""
    return lambda start, count: token_ids[start : start + count]


@dataclass(frozen=True)
class PrefixMatch:
    """The first `num_tokens` tokens of a prompt lie in `blocks`; the last of them may hold more tokens than match."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


class PrefixCache(ABC):
    """Knows which blocks of `pool` hold which prefixes, pins them, and gives up idle ones when room is needed.

    A prefix is the salt and ALL tokens from the first one on: keys and values depend on everything before them. What a
    pinned block holds is never changed: whoever wants to write behind a match that ends inside a block copies it first.
    Each sequence that inserts has a cursor, an object of the cache's own that says how far it has come.
    """

    def __init__(self, pool: BlockPool, block_size: int, eviction: str = "lru") -> None:
        self.pool, self.block_size, self.eviction = pool, block_size, eviction

    @abstractmethod
    def match(self, token_ids: Sequence[int], salt: str = "", limit: int | None = None) -> PrefixMatch:
        """Return the longest prefix of `token_ids` that is cached, of at most `limit` tokens. Changes nothing."""

    @abstractmethod
    def start(self, token_ids: Sequence[int], match: PrefixMatch, salt: str = "") -> object:
        """Record a use of `match` (for the eviction policy) and return the cursor of the sequence that begins with it.

        The caller holds the match's blocks already.
        """

    @abstractmethod
    def copy_cursor(self, cursor: object) -> object:
        """Return the cursor of a sequence that forks off."""

    @abstractmethod
    def insert(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> dict[int, int]:
        """Index what is new among the first `num_computed` tokens, which are computed and lie in `blocks`, and pin it.

        Returns adoptions, logical block -> cached block with the same content, for blocks that were computed twice: the
        caller may put them into its table instead of its own. Blocks that are NO_BLOCK by now are not indexed.
        """

    @abstractmethod
    def end(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> None:
        """The sequence ends or is preempted: index what `insert` left out (a block not full), and let go of its locks.

        Called before the caller releases `blocks`.
        """

    @abstractmethod
    def evict(self, count: int) -> list[int]:
        """Give up idle blocks, by the eviction policy, until `count` became free or none is left.

        Returns all that became free. They may be more than `count` where a prefix lost its head, and its rest its use.
        """

    @abstractmethod
    def forget(self, block: int) -> list[int]:
        """Give up `block`, which is pinned, whoever holds it; return what became free, as `evict` does."""

    @abstractmethod
    def move(self, blocks: Mapping[int, int]) -> None:
        """Follow a compaction: what was in block b is in `blocks[b]` now. Only renames: `BlockPool.move` moves pins."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every prefix; unpins all.

        Sequences that run go on, and their cursors stay usable, but index nothing more: what they compute rests on a
        prefix that was to be forgotten.
        """
