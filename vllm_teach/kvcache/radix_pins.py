"""Which nodes of a radix tree keep which blocks: each (node, block) is a pin of the pool."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.radix_tree import RadixNode


class RadixPins:
    """The nodes that pin each block: one, or a few on one path where a block's tokens are split."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._nodes: dict[int, set[RadixNode]] = {}

    def __len__(self) -> int:
        """Return how many blocks are pinned."""
        return len(self._nodes)

    def of(self, block: int) -> set[RadixNode]:
        """Return the nodes that pin `block`."""
        return self._nodes.get(block, set())

    def add(self, node: RadixNode, block: int) -> None:
        """Let `node` pin `block`, which is held or pinned already."""
        self._nodes.setdefault(block, set()).add(node)
        self._pool.pin(block)

    def remove(self, node: RadixNode, block: int) -> bool:
        """Undo `add`; return whether the block became free."""
        nodes = self._nodes[block]
        nodes.remove(node)
        if not nodes:
            del self._nodes[block]
        self._pool.unpin(block)
        return not nodes and not self._pool.holders(block)

    def share(self, upper: RadixNode, lower: RadixNode) -> None:
        """Follow a split of `lower`: what lies in `upper` alone is its pin now; a block that both record is two."""
        for block in upper.blocks:
            if block == lower.blocks[0]:
                self.add(upper, block)
            else:
                self._nodes[block].remove(lower)
                self._nodes[block].add(upper)

    def move(self, blocks: Mapping[int, int]) -> None:
        """Follow a compaction: rename the moved blocks, here and in the nodes. The pool moves the pins."""
        moved = {block: self._nodes.pop(block) for block in blocks if block in self._nodes}
        for node in {node for nodes in moved.values() for node in nodes}:
            node.blocks = [blocks.get(block, block) for block in node.blocks]
        for block, nodes in moved.items():
            self._nodes[blocks[block]] = nodes

    def clear(self) -> None:
        """Undo every `add`."""
        for block, nodes in self._nodes.items():
            for _ in nodes:
                self._pool.unpin(block)
        self._nodes.clear()
