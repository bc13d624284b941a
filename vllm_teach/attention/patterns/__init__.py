"""Which keys a query may see: patterns, their masks, tile maps and densities, combined with `&`, `|` and `~`."""

from vllm_teach.attention.patterns.band import as_band
from vllm_teach.attention.patterns.base import DiagonalPattern, Pattern
from vllm_teach.attention.patterns.block_sparse import BlockSparsePattern
from vllm_teach.attention.patterns.conversions import (
    FlashArguments,
    to_block_mask,
    to_flash_arguments,
    to_mask_mod,
    why_not_flash,
)
from vllm_teach.attention.patterns.documents import Documents
from vllm_teach.attention.patterns.global_tokens import GlobalTokens
from vllm_teach.attention.patterns.simple import Banded, Causal, LocalWindow, Strided
from vllm_teach.attention.patterns.tile_csr import TileCsr, tile_csr
from vllm_teach.attention.patterns.tiles import TileKind

__all__ = [
    "Banded",
    "BlockSparsePattern",
    "Causal",
    "DiagonalPattern",
    "Documents",
    "FlashArguments",
    "GlobalTokens",
    "LocalWindow",
    "Pattern",
    "Strided",
    "TileCsr",
    "TileKind",
    "as_band",
    "tile_csr",
    "to_block_mask",
    "to_flash_arguments",
    "to_mask_mod",
    "why_not_flash",
]
