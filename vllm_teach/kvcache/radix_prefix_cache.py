"""The prefix cache of SGLang: a radix tree, which finds prefixes token by token.

Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs", section 3 (RadixAttention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.eviction import EvictionQueue, Usage
from vllm_teach.kvcache.prefix_cache import PrefixCache, PrefixMatch, Tokens
from vllm_teach.kvcache.radix_pins import RadixPins
from vllm_teach.kvcache.radix_tree import RadixCursor, RadixNode, split, walk

# The generation of a cursor whose sequence can index nothing more.
DETACHED = -1


class RadixPrefixCache(PrefixCache):
    """Finds prefixes that end anywhere: full blocks as they are computed, and what a sequence left in its last one.

    Each (node, block) of the tree is a pin. Nodes where sequences are at work are locked by their cursors, and every
    node above them by having children: eviction takes the last block of a leaf without lock, as the policy says, and
    so eats prefixes from their tails. When only other blocks are idle (the head of a sequence that gave it back), it
    takes one with all that builds on it, so every idle block can be made free. After `reset`, sequences that were
    running index nothing more: what they compute rests on the prefix that was to be forgotten.
    """

    def __init__(self, pool: BlockPool, block_size: int, eviction: str = "lru") -> None:
        super().__init__(pool, block_size, eviction)
        self._queue: EvictionQueue[RadixNode] = EvictionQueue(eviction)
        self._roots: dict[str, RadixNode] = {}
        self._pins = RadixPins(pool)
        self._generation = 0
        pool.on_idle = self._on_idle

    def __len__(self) -> int:
        """Return how many blocks are cached."""
        return len(self._pins)

    def root(self, salt: str = "") -> RadixNode | None:
        """Return the node above all prefixes under `salt`, to look at and not to change; None if there are none."""
        return self._roots.get(salt)

    def match(self, token_ids: Sequence[int], salt: str = "", limit: int | None = None) -> PrefixMatch:
        """Return the longest cached prefix, of at most `limit` tokens. Changes nothing."""
        if salt not in self._roots:
            return PrefixMatch()
        steps = walk(self._roots[salt], token_ids[:limit])
        blocks: list[int] = []
        end = 0
        for node, matched in steps:
            end = node.start + matched
            # A deeper node's block holds more of a block that they share.
            blocks[node.start // self.block_size :] = node.blocks
        return PrefixMatch(tuple(blocks[: -(-end // self.block_size)]), end)

    def start(self, token_ids: Sequence[int], match: PrefixMatch, salt: str = "") -> RadixCursor:
        """Count a use of the nodes of `match`, and lock the last; splits it where the match ends inside."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = RadixNode(0, [], [], Usage(0, 0, uses=0), salt=salt)
        node = self._descend(root, token_ids[: match.num_tokens])
        self._count_use(node)
        return self._cursor_at(node)

    def copy_cursor(self, cursor: object) -> RadixCursor:
        """Return a cursor at the same place, one lock more."""
        assert isinstance(cursor, RadixCursor)
        if cursor.generation != self._generation:
            return RadixCursor(cursor.node, cursor.generation)
        return self._cursor_at(cursor.node)

    def insert(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> dict[int, int]:
        """Index and pin the blocks that became full; return the cached ones with the same content, if there were any.

        The adopted blocks count as used, too.
        """
        assert isinstance(cursor, RadixCursor)
        return self._extend(cursor, tokens, blocks, num_computed - num_computed % self.block_size)

    def end(self, cursor: object, tokens: Tokens, blocks: Sequence[int], num_computed: int) -> None:
        """Index all computed tokens, the last block's included, and remove the lock."""
        assert isinstance(cursor, RadixCursor)
        self._extend(cursor, tokens, blocks, num_computed)
        if cursor.generation == self._generation:
            self._unlock(cursor)

    def evict(self, count: int) -> list[int]:
        """Give up idle blocks until `count` became free or none is left; return all that became free, maybe more.

        More only where a prefix loses its head, so that the rest is of no use. A leaf that ends in a block which its
        parent records, too, may go without freeing that one: then a match gets shorter within its last block.
        """
        freed: list[int] = []
        while len(freed) < count:
            node = self._queue.pop(self._evictable)
            if node is not None:
                self._cut_tail(node, (node.end - 1) // self.block_size, freed)
                continue
            block = self.pool.longest_idle
            if block is None:
                break
            self._cut_block(block, freed)
        return freed

    def forget(self, block: int) -> list[int]:
        """Give up `block` with all that builds on it; return what became free."""
        freed: list[int] = []
        self._cut_block(block, freed)
        return freed

    def move(self, blocks: Mapping[int, int]) -> None:
        """Rename the moved blocks; the pool moves their pins."""
        self._pins.move(blocks)

    def reset(self) -> None:
        """Forget and unpin everything."""
        self._pins.clear()
        self._roots.clear()
        self._queue.clear()
        self._generation += 1

    def _descend(self, node: RadixNode, token_ids: Sequence[int]) -> RadixNode:
        """Follow `token_ids` down from the end of `node` as far as they are cached; return the node that ends there.

        The match may end inside a node: that is split.
        """
        for child, matched in walk(node, token_ids):
            node = child
            if matched < len(child.tokens):
                node = split(child, matched, self.block_size)
                self._pins.share(node, child)
        return node

    def _extend(self, cursor: RadixCursor, tokens: Tokens, blocks: Sequence[int], end: int) -> dict[int, int]:
        """Index the tokens from the cursor to `end`; move the cursor there; return adoptions."""
        node = cursor.node
        begin = node.end
        if cursor.generation != self._generation or begin >= end:
            return {}
        new = list(tokens(begin, end - begin))
        node = self._descend(node, new)
        if node is not cursor.node:
            self._count_use(node, begin)
        adoptions = self._adopt(node, begin, blocks)
        if node.end < end:
            own = list(blocks[node.end // self.block_size : -(-end // self.block_size)])
            if NO_BLOCK in own:
                # What the sequence gave back was evicted: there is no prefix to build on, now or later.
                self._unlock(cursor)
                cursor.generation = DETACHED
                return adoptions
            node = self._append(node, cursor, new[node.end - begin :], own)
        self._move_cursor(cursor, node)
        return adoptions

    def _adopt(self, node: RadixNode, begin: int, blocks: Sequence[int]) -> dict[int, int]:
        """Return the cached full blocks from position `begin` to the end of `node` that `blocks` holds copies of."""
        adoptions: dict[int, int] = {}
        for part in node.path():
            if part.end <= begin:
                break
            first = part.start // self.block_size
            for i in range(max(first, begin // self.block_size), part.end // self.block_size):
                cached = part.blocks[i - first]
                if cached != blocks[i] != NO_BLOCK:
                    adoptions[i] = cached
        return adoptions

    def _append(self, node: RadixNode, cursor: RadixCursor, new: list[int], own: list[int]) -> RadixNode:
        """Add the tokens `new`, which lie in the blocks `own`, behind `node`; return the node that ends with them.

        `node` itself grows when no other sequence has used it; otherwise they are a child, with a usage of its own.
        """
        start, now = node.end, self._queue.now()
        if node.cursors == {cursor} and not node.children and node.usage.uses == 1:
            if start % self.block_size:
                self._replace_last(node, own.pop(0))
            node.tokens += new
            node.blocks += own
            node.usage.inserted = now
            for block in own:
                self._pins.add(node, block)
            return node
        child = RadixNode(start, new, own, Usage(inserted=now, released=now), node)
        for block in own:
            self._pins.add(child, block)
        if start % self.block_size and not node.children:
            self._replace_last(node, own[0])
        node.children[new[0]] = child
        return child

    def _replace_last(self, node: RadixNode, block: int) -> None:
        """Let `node`, which ends inside a block, record `block`, which holds the same and more, as its last.

        So a block that holds only what another one also holds is not kept: an inner node always records a block of
        one of its children. Ancestors that end in the same block and recorded the old one follow.
        """
        while node.blocks[-1] != block:
            old = node.blocks[-1]
            node.blocks[-1] = block
            self._pins.add(node, block)
            self._pins.remove(node, old)
            if len(node.blocks) > 1 or not node.start % self.block_size:
                break
            assert node.parent is not None
            node = node.parent
            if node.blocks[-1] != old:
                break

    def _cut_block(self, block: int, freed: list[int]) -> None:
        """Remove `block` from the tree with everything that builds on it.

        From the deepest node up: where nodes above it end inside the block, other branches have blocks of their own.
        """
        while self._pins.of(block):
            node = max(self._pins.of(block), key=lambda node: node.start)
            self._cut_tail(node, node.start // self.block_size + node.blocks.index(block), freed)

    def _cut_tail(self, node: RadixNode, logical_block: int, freed: list[int]) -> None:
        """Remove `node`'s tokens in `logical_block` and after it, and all nodes below; appends what became free."""
        for lower in reversed(node.below()):
            self._remove(lower, lower.start, freed)
        self._remove(node, max(node.start, logical_block * self.block_size), freed)

    def _remove(self, node: RadixNode, end: int, freed: list[int]) -> None:
        """Let `node`, a leaf, end at `end`; if nothing of it is left, its cursors go up to its parent."""
        parent = node.parent
        assert parent is not None
        kept = -(-end // self.block_size) - node.start // self.block_size if end > node.start else 0
        dropped = node.blocks[kept:]
        if kept:
            del node.tokens[end - node.start :], node.blocks[kept:]
        else:
            del parent.children[node.tokens[0]]
            node.parent = None
            for cursor in node.cursors:
                cursor.node = parent
            parent.cursors |= node.cursors
            if parent.end % self.block_size and parent.blocks[-1] == node.blocks[0] and parent.children:
                self._replace_last(parent, next(iter(parent.children.values())).blocks[0])
        for block in dropped:
            if self._pins.remove(node, block):
                freed.append(block)
        self._offer(node if kept else parent)

    def _cursor_at(self, node: RadixNode) -> RadixCursor:
        cursor = RadixCursor(node, self._generation)
        node.cursors.add(cursor)
        return cursor

    def _move_cursor(self, cursor: RadixCursor, node: RadixNode) -> None:
        cursor.node.cursors.remove(cursor)
        node.cursors.add(cursor)
        cursor.node = node

    def _unlock(self, cursor: RadixCursor) -> None:
        cursor.node.cursors.remove(cursor)
        self._offer(cursor.node)

    def _count_use(self, node: RadixNode, begin: int = 0) -> None:
        """Count one more sequence for `node` and those above it that end behind position `begin`."""
        for part in node.path():
            if part.end <= begin:
                break
            part.usage.uses += 1

    def _on_idle(self, block: int) -> None:
        """No table holds `block` any more (called by the pool)."""
        if not self._queue.keeps_idle:
            self._cut_block(block, [])
            return
        now = self._queue.now()
        for node in self._pins.of(block):
            node.usage.released = now
            self._offer(node)

    def _offer(self, node: RadixNode) -> None:
        """Line `node` up for eviction, if it can be evicted now; forget it if it is the root of a salt without use."""
        if self._queue.keeps_idle and self._evictable(node):
            self._queue.offer(node, node.usage)
        elif self._roots.get(node.salt) is node and not node.children and not node.cursors:
            del self._roots[node.salt]

    def _evictable(self, node: RadixNode) -> bool:
        """Whether `node` is in the tree, a leaf, not locked, and its last block is idle."""
        return (
            node.parent is not None
            and not node.children
            and not node.cursors
            and not self.pool.holders(node.blocks[-1])
        )
