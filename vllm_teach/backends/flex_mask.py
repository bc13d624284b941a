"""A pattern as FlexAttention's BlockMask, its partial tiles looked up in a tensor.

FlexAttention compiles the rule of a mask into its kernel, so each new rule costs seconds. Here the rule is always the
same, "look into this tensor", and patterns of one size share one kernel. Only PARTIAL tiles are stored: for a causal
mask or a window they grow with n, not with n². (`patterns.conversions.to_block_mask` compiles the rule itself.)
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import BlockMask

from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import LocalWindow
from vllm_teach.attention.patterns.tiles import TileKind, look

TILE = 128  # FlexAttention's own default


def room(length: int) -> int:
    """Return the size that a tensor of `length` positions is padded to: the next power of two, at least one tile.

    A kernel is compiled for each size, so there must be few; the tiles of the padding are EMPTY and cost nothing.
    """
    return max(TILE, 1 << (length - 1).bit_length())


# One entry serves all layers of a model; each may hold some megabytes.
@lru_cache(maxsize=16)
def block_mask(pattern: Pattern | None, q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """Return the BlockMask of `pattern` for tensors padded to `room(q_len)` and `room(kv_len)` positions.

    None shows every key. Padded keys are hidden; what padded queries see means nothing. Both lengths are at least 1.
    Raises InvalidArgumentError when the pattern is not defined for such lengths.
    """
    rule = pattern if pattern is not None else LocalWindow(-1, -1)
    kinds = rule.tile_map(q_len, kv_len, TILE, TILE)
    if kv_len % TILE:
        kinds = kinds.clone()
        kinds[:, -1].clamp_(max=int(TileKind.PARTIAL))  # shown whole, it still hides the padding behind the last key
    partial = torch.nonzero(kinds == TileKind.PARTIAL)
    seen = [visible & real for visible, real in look(rule, partial, q_len, kv_len, TILE, TILE)]
    grown = torch.zeros(room(q_len) // TILE, room(kv_len) // TILE, dtype=torch.int8)  # EMPTY
    grown[: kinds.shape[0], : kinds.shape[1]] = kinds
    # A slot for each PARTIAL tile, one for all EMPTY and one for all FULL ones; the kernel does not look into those
    # two. As many slots as a power of two, since a kernel is compiled for each size.
    tiles = torch.zeros(1 << (len(partial) + 1).bit_length(), TILE, TILE, dtype=torch.bool)
    tiles[1] = True
    if seen:
        tiles[2 : len(partial) + 2] = torch.cat(seen)
    slots = (grown == TileKind.FULL).int()
    slots[partial[:, 0], partial[:, 1]] = torch.arange(2, len(partial) + 2, dtype=torch.int32)
    tiles, slots = tiles.to(device), slots.to(device)

    def looked_up(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return tiles[slots[query // TILE, key // TILE], query % TILE, key % TILE]

    some, whole = (_rows(grown == kind, device) for kind in (TileKind.PARTIAL, TileKind.FULL))
    return BlockMask.from_kv_blocks(
        *some, *whole, BLOCK_SIZE=TILE, mask_mod=looked_up, seq_lengths=(room(q_len), room(kv_len))
    )


def _rows(chosen: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for bool `[q tiles, k tiles]`, BlockMask's (how many per row, which ones first), int32 with [1, 1, …]."""
    counts = chosen.sum(dim=1, dtype=torch.int32)
    order = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None].to(device), order[None, None].to(device)
