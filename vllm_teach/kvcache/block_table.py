"""The block table: where the tokens of one sequence lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Stands in a table where a block was given back because no later query can see it.
NO_BLOCK = -1


@dataclass
class BlockTable:
    """Logical block i of a sequence, its tokens i · block_size and on, is physical block `blocks[i]`, or NO_BLOCK.

    `num_tokens` is how many tokens have their slots, the first of the sequence on; `spare` are blocks held for tokens
    to come, which placements that keep sequences contiguous reserve.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    spare: list[int] = field(default_factory=list)

    def slot(self, position: int) -> int:
        """Return the slot of the token at `position`: its physical block · block_size + its place in the block."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size

    @property
    def contiguous(self) -> bool:
        """Whether its blocks follow one another in memory and none was given back: it can be read as one view."""
        follow = (after == before + 1 for before, after in zip(self.blocks, self.blocks[1:], strict=False))
        return NO_BLOCK not in self.blocks and all(follow)


def without_holes(blocks: Iterable[int]) -> list[int]:
    """Return `blocks` but for those that are NO_BLOCK."""
    return [block for block in blocks if block != NO_BLOCK]


def put_between_holes(pattern: Iterable[int], blocks: Iterable[int]) -> list[int]:
    """Return `blocks`, in order, with a NO_BLOCK wherever `pattern` has one: the inverse of `without_holes`."""
    following = iter(blocks)
    return [NO_BLOCK if each == NO_BLOCK else next(following) for each in pattern]
