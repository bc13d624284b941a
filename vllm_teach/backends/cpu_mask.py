"""A pattern as the C++ kernel wants it: a band, or lists of the tiles that a sequence's queries see."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from vllm_teach.attention.patterns.band import as_band
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.last_rows import last_rows
from vllm_teach.attention.patterns.tile_csr import TileCsr, tile_csr
from vllm_teach.kernels import cpu_attention as kernel


class KernelMask(NamedTuple):
    """Which keys a query sees: those of the band from `left` to `right` of it and, with `lists`, those of its tiles."""

    left: int
    right: int
    tile_q: int = 0  # queries of a tile
    lists: ctypes.Array[kernel.TileList] | None = None
    list_of: list[int] | None = None  # for each sequence, which of the lists
    memory: tuple[TileCsr, ...] = ()  # keeps alive what the lists point to


def kernel_mask(pattern: Pattern | None, lengths: list[tuple[int, int]], group: int, *, together: bool) -> KernelMask:
    """Return the mask of sequences of these `lengths`, (queries, keys) each; None is the pattern that masks nothing.

    `group` is how many query heads share a key/value head. With `together`, the sequences have no batch dimension, and
    all single queries get their tiles from one list.
    """
    if pattern is None:
        return KernelMask(kernel.UNLIMITED, kernel.UNLIMITED)
    if (band := as_band(pattern)) is None:
        # The lengths of a dense batch come again, and their tiles are remembered.
        return _tile_lists(pattern, lengths, group, together)
    left, right = (kernel.UNLIMITED if side == -1 else min(side, kernel.UNLIMITED) for side in band)
    return KernelMask(left, right)


def _tile_lists(pattern: Pattern, lengths: list[tuple[int, int]], group: int, together: bool) -> KernelMask:
    """Return one list of tiles for each pair of lengths that occurs; with `together`, one for all single queries."""
    # A power of two, so that the tiles fit into the blocks of block-sparse patterns; some 256 rows with all heads.
    tile_q = 1 << max(4, (256 // group).bit_length() - 1)
    list_of = [0] * len(lengths)
    lists: list[kernel.TileList] = []
    memory: list[TileCsr] = []
    alone: dict[tuple[int, int], list[int]] = {}  # (q_len, kv_len) -> the sequences of these lengths
    decoding: list[int] = []
    for index, (q_len, kv_len) in enumerate(lengths):
        if together and q_len == 1:
            decoding.append(index)
        else:
            alone.setdefault((q_len, kv_len), []).append(index)
    if not alone:
        tile_q = 1
    if decoding:
        memory.append(last_rows(pattern, [lengths[index][1] for index in decoding], tile_q, kernel.TILE_KEYS))
        for row, index in enumerate(decoding):
            list_of[index] = row
            lists.append(_list(memory[0], row))
    for pair, indices in alone.items():
        for index in indices:
            list_of[index] = len(lists)
        memory.append(tile_csr(pattern, *pair, tile_q, kernel.TILE_KEYS))
        lists.append(_list(memory[-1]))
    return KernelMask(
        kernel.UNLIMITED, kernel.UNLIMITED, tile_q, (kernel.TileList * len(lists))(*lists), list_of, tuple(memory)
    )


def _list(csr: TileCsr, first_row: int = 0) -> kernel.TileList:
    """Return the pointers of `csr` for a sequence whose first tile of queries is row `first_row`."""
    row_ptr = csr.row_ptr.data_ptr() + first_row * csr.row_ptr.element_size()
    return kernel.TileList(row_ptr, csr.k_tile.data_ptr(), csr.mask_index.data_ptr(), csr.masks.data_ptr())
