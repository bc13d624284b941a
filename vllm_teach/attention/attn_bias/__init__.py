"""xFormers' attention biases: what `memory_efficient_attention` takes as `attn_bias`, by xFormers' names.

Two families. A rule for the whole matrix (`triangular`) says which keys a query sees by their places alone. A division
into sequences (`block_diagonal`, `padded_keys`, `paged`) says which rows of q and of k and v belong together, and then
has such a rule for each sequence. Mind the names: a mask without "FromBottomRight" or "WithOffset" in its name is
aligned top-left, where query i stands at key i; everything else in this project is aligned bottom-right, where the
last query stands at the last key.

The names, the constructors and what they mean are those of `xformers.ops.fmha.attn_bias` (xFormers 0.0.35). Of that
file only the masks with gaps between the keys ("GappyKeys") are not here.
"""

from vllm_teach.attention.attn_bias.alignment import Shifted
from vllm_teach.attention.attn_bias.base import AttentionBias
from vllm_teach.attention.attn_bias.block_diagonal import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
)
from vllm_teach.attention.attn_bias.padded_keys import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
)
from vllm_teach.attention.attn_bias.paged import (
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from vllm_teach.attention.attn_bias.triangular import (
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "Shifted",
]
