"""Patterns in the words of other libraries: FlexAttention's BlockMask and FlashAttention's causal and window_size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch

from vllm_teach.attention.patterns.band import EVERYTHING, as_band
from vllm_teach.attention.patterns.base import Pattern, check_pattern
from vllm_teach.attention.patterns.tiles import TileKind
from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# (batch, head, query index, key index) -> bool
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def to_mask_mod(pattern: Pattern, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> MaskMod:
    """Return FlexAttention's `mask_mod` for `pattern`: the same for every batch and head.

    FlexAttention counts queries from 0, and a pattern asks for positions: the difference, kv_len - q_len, is captured
    as a tensor, so that compiled code serves other lengths, too.

    Raises InvalidArgumentError when a length is negative or the pattern not defined here.
    """
    check_pattern(pattern)
    pattern.check(q_len, kv_len)
    device = torch.device(device)
    rule = pattern.rule(device)
    offset = torch.tensor(kv_len - q_len, device=device)

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return rule(query + offset, key)

    return mask_mod


def to_block_mask(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Return FlexAttention's BlockMask for `pattern`, of one batch and one head, which serve all.

    It equals what `create_block_mask` makes of `to_mask_mod`, but comes from the tile map instead of all
    q_len * kv_len pairs. `block_size`, or (rows, keys), is that of FlexAttention's blocks, which are tiles here.

    Raises InvalidArgumentError when a length is not positive (FlexAttention knows no empty mask), the block size not
    positive, or the pattern not defined here.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_pattern(pattern)
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length == 0:
            raise InvalidArgumentError(f"{name} is 0; FlexAttention needs at least one query and one key.")
    sizes = block_size if isinstance(block_size, list | tuple) and len(block_size) == 2 else (block_size, block_size)
    tile_q, tile_k = (check_count("block_size", size, 1) for size in sizes)
    kinds = pattern.tile_map(q_len, kv_len, tile_q, tile_k)
    full = kinds == TileKind.FULL
    # FlexAttention masks what a short tile lacks, so that for it the last ones are never full.
    full[q_len // tile_q :] = False
    full[:, kv_len // tile_k :] = False
    cut_count, cut = _indices((kinds != TileKind.EMPTY) & ~full, device)
    full_count, whole = _indices(full, device)
    return BlockMask.from_kv_blocks(
        cut_count,
        cut,
        full_count,
        whole,
        BLOCK_SIZE=(tile_q, tile_k),
        mask_mod=to_mask_mod(pattern, q_len, kv_len, device),
        seq_lengths=(q_len, kv_len),
    )


def _indices(chosen: torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles of each row are chosen, and their indices, before those that are not.

    bool `[q_tiles, k_tiles]` -> int32 `[1, 1, q_tiles]` and `[1, 1, q_tiles, k_tiles]`: one batch, one head.
    """
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    count = chosen.sum(dim=-1)
    return count[None, None].to(device, torch.int32), order[None, None].to(device, torch.int32)


class FlashArguments(TypedDict):
    """Two arguments of `flash_attn_func`: `window_size` is (left, right), inclusive, -1 for no limit."""

    causal: bool
    window_size: tuple[int, int]


def to_flash_arguments(pattern: Pattern | None, q_len: int, kv_len: int) -> FlashArguments | None:
    """Return FlashAttention's arguments for `pattern`, or None when it has none: `why_not_flash` says why.

    Expressible are what `as_band` knows, and a pattern that hides no pair of these lengths.
    Raises InvalidArgumentError when a length is negative or the pattern not defined here.
    """
    if pattern is None:
        check_count("q_len", q_len, 0)
        check_count("kv_len", kv_len, 0)
    else:
        check_pattern(pattern)
        pattern.check(q_len, kv_len)
    band = as_band(pattern)
    if band is None and pattern is not None and _hides_nothing(pattern, q_len, kv_len):
        band = EVERYTHING
    if band is None:
        return None
    left, right = band
    return {"causal": right == 0, "window_size": EVERYTHING if band == (-1, 0) else (left, right)}


def why_not_flash(pattern: Pattern | None, q_len: int, kv_len: int) -> str | None:
    """Return why FlashAttention cannot apply `pattern`, or None when it can; raises as `to_flash_arguments` does."""
    if to_flash_arguments(pattern, q_len, kv_len) is not None:
        return None
    return f"FlashAttention has causal masks and windows, and {pattern!r} is neither."


def _hides_nothing(pattern: Pattern, q_len: int, kv_len: int) -> bool:
    return bool((pattern.tile_map(q_len, kv_len, 128, 128) == TileKind.FULL).all())
