"""Patterns drawn block by block: a coarse grid of booleans says which block of queries sees which block of keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_teach.attention.patterns.base import Pattern, Rule
from vllm_teach.attention.patterns.tiles import Spans, kinds, remembered
from vllm_teach.attention.shapes import LARGEST_COUNT, check_count, check_real, check_real_device, check_tensor
from vllm_teach.errors import InvalidArgumentError

Layout = Sequence[Sequence[bool]] | np.ndarray | torch.Tensor


@dataclass(frozen=True, init=False, repr=False)
class BlockSparsePattern(Pattern):
    """The queries of block a see the keys of block b where layout[a][b] is set; a block is `block` positions.

    `layout` is square, `[blocks, blocks]` of booleans or 0 and 1: a nested list, an array or a tensor, kept as a tuple
    of tuples. It must cover all keys. A query before position 0, or behind the last block, sees nothing. A block on the
    diagonal shows the keys after a query, too: for text generation take `BlockSparsePattern(…) & Causal()`.

    Block-sparse attention: Sparse Transformer (arXiv 1904.10509, section 5.5) and BigBird (arXiv 2007.14062).
    """

    layout: tuple[tuple[bool, ...], ...]
    block: int

    def __init__(self, layout: Layout, block: int = 256) -> None:
        object.__setattr__(self, "layout", _rows(layout))
        object.__setattr__(self, "block", check_count("block", block, 1))
        if self.covered > LARGEST_COUNT:
            raise InvalidArgumentError(f"block is {block}, which times {len(self.layout)} blocks is above 2**62.")

    @classmethod
    def local_and_global(
        cls, num_blocks: int, block: int = 256, *, local: int = 3, global_: int = 1, causal: bool = True
    ) -> BlockSparsePattern:
        """Return a band of blocks and some that all see: BigBird's window and global tokens (section 2).

        A block of queries sees `local` blocks, the last of which is its own, and the first `global_` blocks. Without
        `causal` the band has as many blocks after its own as before it, and the first `global_` blocks see all.
        """
        check_count("num_blocks", num_blocks, 0)
        check_count("local", local, 1)
        check_count("global_", global_, 0)

        def shown(query: int, key: int) -> bool:
            if causal:
                return key <= query and (query - key < local or key < global_)
            return abs(query - key) < local or key < global_ or query < global_

        return cls([[shown(query, key) for key in range(num_blocks)] for query in range(num_blocks)], block)

    @classmethod
    def random(
        cls, num_blocks: int, block: int = 256, *, density: float, seed: int = 0, causal: bool = True
    ) -> BlockSparsePattern:
        """Return a layout with the share `density` of its blocks set, those on the diagonal and others at random.

        With `causal` the share is of the blocks on and below the diagonal, and no other is set. The same seed gives
        the same layout everywhere.

        Raises InvalidArgumentError when `density` exceeds 1 or is too low for the diagonal.
        """
        num_blocks, seed = check_count("num_blocks", num_blocks, 1), check_count("seed", seed, 0)
        others = [(query, key) for query in range(num_blocks) for key in range(query if causal else num_blocks)]
        others = [pair for pair in others if pair[0] != pair[1]]
        total = num_blocks + len(others)
        wanted = round(check_real("density", density) * total)
        if not num_blocks <= wanted <= total:
            raise InvalidArgumentError(
                f"density is {density}; of {num_blocks} blocks, give {num_blocks / total:.3f}, their diagonal, to 1."
            )
        layout = np.eye(num_blocks, dtype=bool)
        for query, key in random.Random(seed).sample(others, wanted - num_blocks):
            layout[query, key] = True
        return cls(layout, block)

    @property
    def covered(self) -> int:
        """How many positions the layout describes."""
        return len(self.layout) * self.block

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.rule(q_pos.device)(q_pos, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        table, blocks, block = _layout_table(self.layout, device), len(self.layout), self.block

        def block_of(position: torch.Tensor) -> torch.Tensor:
            outside = (position < 0) | (position >= blocks * block)
            return torch.where(outside, blocks, position // block)

        return lambda q_pos, k_pos: table[block_of(q_pos), block_of(k_pos)]

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Exact: counts the set blocks in the rectangle of blocks that a tile touches, by differences of sums."""
        first, last = queries.first[:, None], queries.last[:, None]
        inside = (first >= 0) & (last < self.covered)
        top = first.clamp(0, self.covered) // self.block
        bottom = last.clamp(-1, self.covered - 1) // self.block + 1  # a span before position 0 touches no block
        left, right = (keys.first // self.block)[None, :], (keys.last // self.block)[None, :] + 1
        sums = _layout_sums(self.layout)  # [blocks + 1, blocks + 1]
        count = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
        return kinds(count == 0, inside & (count == (bottom - top) * (right - left)))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        if kv_len > self.covered:
            raise InvalidArgumentError(
                f"layout has {len(self.layout)} blocks of {self.block}, which cover {self.covered} positions, and "
                f"kv_len is {kv_len}; give it at least {-(-kv_len // self.block)} blocks."
            )

    def __repr__(self) -> str:
        blocks, seen = len(self.layout), sum(map(sum, self.layout))
        return f"BlockSparsePattern({blocks} x {blocks} blocks of {self.block}, {seen} of {blocks * blocks} set)"


@remembered(16)
def _layout_table(layout: tuple[tuple[bool, ...], ...], device: torch.device) -> torch.Tensor:
    """The layout as bool `[blocks + 1, blocks + 1]`; the last row and column serve positions outside."""
    table = torch.tensor(layout, dtype=torch.bool).view(len(layout), len(layout))
    return torch.nn.functional.pad(table, (0, 1, 0, 1)).to(device)


@remembered(16)
def _layout_sums(layout: tuple[tuple[bool, ...], ...]) -> torch.Tensor:
    """How many blocks are set above and to the left of each corner, int64 `[blocks + 1, blocks + 1]`."""
    table = _layout_table(layout, torch.device("cpu"))[:-1, :-1]
    return torch.nn.functional.pad(table.cumsum(0).cumsum(1), (1, 0, 1, 0))


def _rows(layout: Layout) -> tuple[tuple[bool, ...], ...]:
    if isinstance(layout, torch.Tensor):
        check_tensor("layout", layout)
        check_real_device("layout", layout)
        layout = layout.tolist()
    try:
        array = np.asarray(layout)
    except ValueError as error:  # rows of different lengths
        raise InvalidArgumentError(f"layout is no grid ({error}); give [blocks, blocks] of booleans.") from error
    if array.shape in ((0,), (0, 0)):  # neither says of what type its blocks are
        array = np.empty((0, 0), dtype=bool)
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise InvalidArgumentError(f"layout has shape {list(array.shape)}; make it square, [blocks, blocks].")
    if array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        raise InvalidArgumentError(f"layout has dtype {array.dtype}; give booleans, or whole numbers 0 and 1.")
    return tuple(tuple(row) for row in array.astype(bool).tolist())
