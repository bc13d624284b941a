"""The prefix cache of vLLM: full blocks in a flat dictionary, keyed by a chain of hashes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.eviction import EvictionQueue, Usage
from vllm_teach.kvcache.prefix_cache import PrefixCache, PrefixMatch, Tokens

DIGEST_BYTES = 32


def hash_salt(salt: str) -> bytes:
    """Return the key of the empty prefix: everything that follows depends on the salt."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES, person=b"salt").digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a block with `token_ids` after the prefix with the key `parent`.

    The parent's key and each token have a fixed width, so no two inputs pack into the same bytes ([1, 23] and [12, 3]
    do not). 256 bits: no two texts with one key will be found, so equal keys mean equal prefixes without comparing
    tokens. A weaker hash would let one user's crafted prompt read another's cache.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, person=b"block").digest()


@dataclass(eq=False)
class CachedBlock:
    """One full block of the index: `key` names its tokens and all before them."""

    key: bytes
    parent: bytes
    block: int
    usage: Usage


@dataclass
class HashCursor:
    """A sequence's first `num_blocks` blocks are indexed (or were); the last of them has the key `key`."""

    key: bytes
    num_blocks: int
    generation: int


class HashPrefixCache(PrefixCache):
    """Finds whole blocks: the key of block i hashes its tokens and the key of block i - 1 (vLLM's design).

    One cached block for each key, one pin for each cached block. Of idle blocks those without a cached successor go
    first, so a prefix is eaten from its tail: blocks whose head is gone cannot be found. A sequence that gave back its
    head but still holds its tail may leave such blocks; they, too, go when they are idle, or count again when the
    head is computed anew. After `reset`, sequences that were running index nothing more: what they compute rests on
    the prefix that was to be forgotten.
    """

    def __init__(self, pool: BlockPool, block_size: int, eviction: str = "lru") -> None:
        super().__init__(pool, block_size, eviction)
        self._queue: EvictionQueue[CachedBlock] = EvictionQueue(eviction)
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        # Cached successors of each key, the key's own block cached or not.
        self._successors: Counter[bytes] = Counter()
        self._generation = 0
        pool.on_idle = self._on_idle

    def __len__(self) -> int:
        """Return how many blocks are cached."""
        return len(self._by_key)

    def match(self, token_ids: Sequence[int], salt: str = "", limit: int | None = None) -> PrefixMatch:
        """Return the longest cached prefix of whole blocks, of at most `limit` tokens. Changes nothing."""
        size = self.block_size
        length = len(token_ids) if limit is None else min(limit, len(token_ids))
        key, blocks = hash_salt(salt), []
        for start in range(0, length - size + 1, size):
            key = hash_block(key, token_ids[start : start + size])
            cached = self._by_key.get(key)
            if cached is None:
                break
            blocks.append(cached.block)
        return PrefixMatch(tuple(blocks), len(blocks) * size)

    def start(self, token_ids: Sequence[int], match: PrefixMatch, salt: str = "") -> HashCursor:
        """Count a use of each block of `match`; the cursor stands behind it."""
        for block in match.blocks:
            self._by_block[block].usage.uses += 1
        key = self._by_block[match.blocks[-1]].key if match.blocks else hash_salt(salt)
        return HashCursor(key, len(match.blocks), self._generation)

    def copy_cursor(self, cursor: object) -> HashCursor:
        """Return a cursor at the same place."""
        assert isinstance(cursor, HashCursor)
        return HashCursor(cursor.key, cursor.num_blocks, cursor.generation)

    def insert(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> dict[int, int]:
        """Index and pin the blocks that became full; return the cached ones with the same content, if there were any.

        The adopted block counts as used, too.
        """
        assert isinstance(cursor, HashCursor)
        adoptions: dict[int, int] = {}
        if cursor.generation != self._generation:
            return adoptions
        for i in range(cursor.num_blocks, num_computed // self.block_size):
            parent = cursor.key
            cursor.key = hash_block(parent, tokens(i * self.block_size, self.block_size))
            cursor.num_blocks = i + 1
            cached = self._by_key.get(cursor.key)
            if blocks[i] == NO_BLOCK:
                continue
            if cached is None:
                self._add(cursor.key, parent, blocks[i])
            elif cached.block != blocks[i]:
                cached.usage.uses += 1
                adoptions[i] = cached.block
        return adoptions

    def end(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> None:
        """Index the last full blocks. There are no locks: what a table holds is not idle."""
        self.insert(cursor, tokens, blocks, num_computed)

    def evict(self, count: int) -> list[int]:
        """Give up idle blocks until `count` became free or none is left; those without cached successors first."""
        freed: list[int] = []
        while len(freed) < count:
            cached = self._queue.pop(self._evictable)
            if cached is None:
                block = self.pool.longest_idle
                if block is None:
                    break
                cached = self._by_block[block]
            freed.append(cached.block)
            self._remove(cached)
        return freed

    def forget(self, block: int) -> list[int]:
        """Give up `block`; what is cached behind it stays, and cannot be found without it."""
        free = [] if self.pool.holders(block) else [block]
        self._remove(self._by_block[block])
        return free

    def move(self, blocks: Mapping[int, int]) -> None:
        """Rename the moved blocks; the pool moves their pins."""
        moved = [self._by_block.pop(block) for block in blocks if block in self._by_block]
        for cached in moved:
            cached.block = blocks[cached.block]
            self._by_block[cached.block] = cached

    def reset(self) -> None:
        """Forget and unpin every block."""
        for block in self._by_block:
            self.pool.unpin(block)
        self._by_key.clear()
        self._by_block.clear()
        self._successors.clear()
        self._queue.clear()
        self._generation += 1

    def _add(self, key: bytes, parent: bytes, block: int) -> None:
        now = self._queue.now()
        cached = CachedBlock(key, parent, block, Usage(inserted=now, released=now))
        self._by_key[key] = self._by_block[block] = cached
        self._successors[parent] += 1
        self.pool.pin(block)

    def _remove(self, cached: CachedBlock) -> None:
        """Take `cached` out of the index; its predecessor may be the next to go."""
        del self._by_key[cached.key], self._by_block[cached.block]
        self.pool.unpin(cached.block)
        self._successors[cached.parent] -= 1
        if not self._successors[cached.parent]:
            del self._successors[cached.parent]
            predecessor = self._by_key.get(cached.parent)
            if predecessor is not None and self._evictable(predecessor):
                self._queue.offer(predecessor, predecessor.usage)

    def _on_idle(self, block: int) -> None:
        """No table holds `block` any more (called by the pool)."""
        cached = self._by_block[block]
        if not self._queue.keeps_idle:
            self._remove(cached)
            return
        cached.usage.released = self._queue.now()
        if self._evictable(cached):
            self._queue.offer(cached, cached.usage)

    def _evictable(self, cached: CachedBlock) -> bool:
        """Whether `cached` is in the index and idle, and no cached block follows it."""
        return (
            self._by_key.get(cached.key) is cached
            and not self.pool.holders(cached.block)
            and cached.key not in self._successors
        )
