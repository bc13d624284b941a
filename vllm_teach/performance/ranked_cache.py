"""A prefix cache of whole blocks with any eviction rule, small enough to read: to try rules, and to check others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.prefix_traces import Visit


@dataclass(frozen=True)
class BlockUse:
    """What a rule may know of a cached block: the numbers of the requests, counted from 0, that first computed it and
    that held it last, and how many requests have held it.
    """

    inserted: int
    released: int
    uses: int


# The block with the lowest rank is given up first.
Rank = Callable[[BlockUse], Any]


@dataclass(eq=False)
class _Block:
    parent: _Block | None
    use: BlockUse
    children: int = 0


class RankedCache:
    """Serves one request after the other from `num_blocks` blocks; of equal ranks the longest unused goes first.

    As in `HashPrefixCache`, a block goes only after those that build on it. `hits` counts prompt tokens found.
    """

    def __init__(self, num_blocks: int, block_size: int, rank: Rank) -> None:
        self.num_blocks, self.block_size, self.rank = num_blocks, block_size, rank
        self.hits = self.evictions = self._now = 0
        self._blocks: dict[tuple[int, ...], _Block] = {}  # keyed by all tokens from the first one on

    def serve(self, visit: Visit) -> int:
        """Look up, compute, answer and free one request; return the prompt tokens found.

        Raises InvalidArgumentError when it does not fit.
        """
        size, text = self.block_size, (*visit.prompt, *visit.answer)
        num_tokens = max(len(visit.prompt), len(text) - 1)
        found = 0
        while (found + 1) * size < len(visit.prompt) and text[: (found + 1) * size] in self._blocks:
            found += 1
        held = {self._blocks[text[: (i + 1) * size]] for i in range(found)}
        self._make_room(-(-num_tokens // size) - found, held)
        parent = None
        for end in range(size, num_tokens + 1, size):
            parent = self._use(text[:end], parent)
        self.hits += found * size
        self._now += 1
        return found * size

    def _use(self, prefix: tuple[int, ...], parent: _Block | None) -> _Block:
        block = self._blocks.get(prefix)
        if block is None:
            block = self._blocks[prefix] = _Block(parent, BlockUse(self._now, self._now, 1))
            if parent is not None:
                parent.children += 1
        else:
            block.use = BlockUse(block.use.inserted, self._now, block.use.uses + 1)
        return block

    def _make_room(self, needed: int, held: set[_Block]) -> None:
        """Give up blocks until `needed` are free; each time the one of the lowest rank that nothing builds on."""
        while self.num_blocks - len(self._blocks) < needed:
            leaves = [
                (prefix, block) for prefix, block in self._blocks.items() if not block.children and block not in held
            ]
            if not leaves:
                raise InvalidArgumentError(f"num_blocks={self.num_blocks} is too few: a request needs {needed} more.")
            prefix, block = min(leaves, key=lambda leaf: (self.rank(leaf[1].use), leaf[1].use.released))
            del self._blocks[prefix]
            self.evictions += 1
            if block.parent is not None:
                block.parent.children -= 1


def count_hits(trace: Sequence[Visit], num_blocks: int, block_size: int, rank: Rank) -> int:
    """Return the prompt tokens that a cache with this rule finds while it serves `trace`."""
    cache = RankedCache(num_blocks, block_size, rank)
    for visit in trace:
        cache.serve(visit)
    return cache.hits
