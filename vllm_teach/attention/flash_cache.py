"""Where the keys and values of a batch lie in a cache: how they are appended, and how they are read.

A dense cache `[batch_cache, capacity, kv_heads, head_dim]` is a paged one whose blocks hold `capacity` slots, with one
block per sequence. So there is one piece of code for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_teach.attention.shapes import check_ints
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class CacheBlocks:
    """Sequence i's slot p is slot p % block_size of block tables[i][p // block_size] of `k_cache` and `v_cache`.

    Both are `[num_blocks, block_size, kv_heads, head_dim]` and need not be contiguous.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[list[int]]

    @classmethod
    def of(
        cls,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: int,
        cache_batch_idx: torch.Tensor | None,
        block_table: torch.Tensor | None,
    ) -> CacheBlocks:
        """Return the blocks of `batch` sequences: those of `block_table`, else the rows `cache_batch_idx`, else all.

        Raises InvalidArgumentError when both are given or one does not fit. A block that is not there is an error only
        if it is used: see `check`.
        """
        if block_table is not None:
            if cache_batch_idx is not None:
                raise InvalidArgumentError(
                    "cache_batch_idx and block_table are both given; a block table says itself where a sequence lies, "
                    "so reorder its rows and leave cache_batch_idx out."
                )
            check_ints("block_table", block_table, (batch, None))
            if k_cache.shape[1] == 0:
                raise InvalidArgumentError(f"k_cache has shape {list(k_cache.shape)}; a block must hold a key.")
            return cls(k_cache, v_cache, block_table.tolist())
        if cache_batch_idx is None and batch > len(k_cache):
            raise InvalidArgumentError(
                f"q has {batch} sequences and k_cache {len(k_cache)} rows; give one row for each."
            )
        rows = list(range(batch))
        if cache_batch_idx is not None:
            check_ints("cache_batch_idx", cache_batch_idx, (batch,))
            rows = cache_batch_idx.tolist()
        for row in rows:
            if not 0 <= row < len(k_cache):
                raise InvalidArgumentError(
                    f"cache_batch_idx holds {row}; k_cache has the rows 0 to {len(k_cache) - 1}."
                )
        return cls(k_cache, v_cache, [[row] for row in rows])

    @property
    def block_size(self) -> int:
        """Return how many slots a block has."""
        return self.k_cache.shape[1]

    def room(self, index: int) -> int:
        """Return how many slots sequence `index` has."""
        return len(self.tables[index]) * self.block_size

    def check(self, index: int, start: int, end: int) -> None:
        """Raise InvalidArgumentError unless the blocks of the slots `start` to before `end` are in the cache."""
        for block in self._blocks(index, start, end):
            if not 0 <= block < len(self.k_cache):
                raise InvalidArgumentError(
                    f"block_table holds {block} for sequence {index}; "
                    f"k_cache has the blocks 0 to {len(self.k_cache) - 1}."
                )

    def append(self, index: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[new_len, kv_heads, head_dim]` to the slots from `start` on, a block at a time, in order."""
        done = 0
        while done < len(k):
            block, slot = divmod(start + done, self.block_size)
            count = min(self.block_size - slot, len(k) - done)
            for cache, new in ((self.k_cache, k), (self.v_cache, v)):
                cache[self.tables[index][block], slot : slot + count] = new[done : done + count]
            done += count

    def read(self, index: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of the slots `start` to before `end`, `[end - start, kv_heads, head_dim]`.

        A view where they lie in one block, else a copy. No slot outside is looked at: what it holds cannot leak.
        """
        return self._read_one(self.k_cache, index, start, end), self._read_one(self.v_cache, index, start, end)

    def _read_one(self, cache: torch.Tensor, index: int, start: int, end: int) -> torch.Tensor:
        blocks = self._blocks(index, start, end)
        if not blocks:
            return cache.new_empty(0, *cache.shape[2:])
        skipped = start // self.block_size * self.block_size
        if len(blocks) == 1:
            return cache[blocks[0], start - skipped : end - skipped]
        gathered = cache[torch.tensor(blocks, device=cache.device)]  # [blocks, block_size, kv_heads, head_dim]
        return gathered.flatten(0, 1)[start - skipped : end - skipped]

    def _blocks(self, index: int, start: int, end: int) -> list[int]:
        if start == end:
            return []
        return self.tables[index][start // self.block_size : -(-end // self.block_size)]
