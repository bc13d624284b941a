"""The tensors of an INT8 KV cache: a quarter of float32's bytes, half of bfloat16's, and the same block transfers.

Each token's key and value of each head has a scale of its own, the largest magnitude / 127, so that a token is written
once and for good: a scale for a whole block would have to grow with the tokens that come, and their order would matter.
KVQuant (Hooper et al. 2024, arXiv 2401.18079) and KIVI (Liu et al. 2024, arXiv 2402.02750) go below 8 bits, and need a
scale per channel for the keys.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_teach.kvcache.storage import KVStorage

LARGEST_CODE = 127
# Stands for a scale of 0 where we divide by it: float32's smallest number, so that it stands for no other.
_SMALLEST_DIVISOR = 2.0**-149


def packed_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one key or value of one head: a code per number, and the scale in the model's `dtype`."""
    return _scale_place(head_dim, dtype) + dtype.itemsize


def pack(x: Tensor) -> Tensor:
    """Quantise the last dimension of `x` `[..., head_dim]`; return codes and scale side by side, int8 `[..., bytes]`.

    x ≈ scale · code with the codes -127 … 127: symmetric, without a zero point. The scale is rounded to x's dtype
    before the codes are chosen, so that rounding it costs nothing, but for float16's rows below 0.008, where it has few
    such small scales, and for the very largest numbers of a dtype, which come back infinite. A row with a NaN or an
    infinity comes back as NaN.
    """
    head_dim = x.shape[-1]
    scales = x.abs().amax(-1, keepdim=True) / LARGEST_CODE  # [..., 1]
    steps = x.float() / scales.float().clamp_min(_SMALLEST_DIVISOR)
    packed = torch.zeros((*x.shape[:-1], packed_bytes(head_dim, x.dtype)), dtype=torch.int8, device=x.device)
    packed[..., :head_dim] = steps.round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    packed[..., _scale_place(head_dim, x.dtype) :] = scales.view(torch.int8)
    return packed


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out` `[..., head_dim]` with the numbers that `packed` stands for, in out's dtype, and return it.

    `packed` is what `pack` gave for numbers of that dtype, int8 `[..., bytes]`, its bytes side by side.
    """
    head_dim = out.shape[-1]
    scales = packed[..., _scale_place(head_dim, out.dtype) :].view(out.dtype)  # [..., 1]
    return out.copy_(packed[..., :head_dim]).mul_(scales)


def _scale_place(head_dim: int, dtype: torch.dtype) -> int:
    """Return where the scale begins: behind the codes, at a multiple of its own size, so that it can be viewed."""
    return -(-head_dim // dtype.itemsize) * dtype.itemsize


class QuantizedKVStorage(KVStorage):
    """A `KVStorage` whose `keys` and `values` are packed: int8 `[layers, num_blocks + 1, block_size, kv_heads, bytes]`.

    Copies, moves and swaps move bytes, and so the scales with the codes. `dtype` is that of the keys and values that
    are written and read. Attention that cannot read codes (see `backends.packed`) gets numbers by `DequantizedBlocks`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_host_blocks: int = 0,
        swap_file: str | Path | None = None,
    ) -> None:
        self.head_dim, self.dtype = head_dim, dtype
        form = (num_layers, num_blocks, block_size, kv_heads, packed_bytes(head_dim, dtype))
        super().__init__(*form, torch.int8, device, num_host_blocks, swap_file)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantise `k` and `v` `[tokens, kv_heads, head_dim]` of `layer` and store them; see `KVStorage.write`."""
        super().write(layer, slots, *pack(torch.stack((k, v))))


class DequantizedBlocks:
    """What one step may read of a quantised cache, as numbers; for the forward pass it stands for the `KVStorage`.

    `keys[layer]` and `values[layer]` are the blocks of the step's block table in the cache's dtype, `[blocks,
    block_size, kv_heads, head_dim]`, each block once, made when they are asked for. All layers share their memory, so
    the next layer's overwrite them: beside the cache, a step takes what one layer's blocks in use take unquantised.

    `block_table` is the step's, of the same shape, with the places in that copy. Blocks that followed one another do so
    there too.
    """

    def __init__(self, storage: QuantizedKVStorage, block_table: Tensor) -> None:
        blocks, places = block_table.unique(return_inverse=True)
        self.block_table = places.to(torch.int32)
        self.write = storage.write
        self.keys, self.values = (_Layers(cache, blocks, storage) for cache in (storage.keys, storage.values))


class _Layers:
    """`layers[i]`: the numbers of layer i's chosen blocks, in the same memory for every i."""

    def __init__(self, packed: Tensor, blocks: Tensor, storage: QuantizedKVStorage) -> None:
        self._packed, self._blocks = packed, blocks
        form = (len(blocks), *packed.shape[2:-1])  # [blocks, block_size, kv_heads]
        self._gathered = packed.new_empty((*form, packed.shape[-1]))
        self._numbers = packed.new_empty((*form, storage.head_dim), dtype=storage.dtype)

    def __getitem__(self, layer: int) -> Tensor:
        torch.index_select(self._packed[layer], 0, self._blocks, out=self._gathered)
        return unpack(self._gathered, self._numbers)
