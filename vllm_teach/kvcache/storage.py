"""The tensors of the KV cache, in blocks, and the host's swap space. Who holds which block is the manager's affair."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from vllm_teach.kvcache.swap_file import SwapFile
from vllm_teach.kvcache.transfers import Transfer

# The most that a transfer holds beside the cache itself; a single layer's blocks may take more.
TEMPORARY_BYTES = 64 << 20


class KVStorage:
    """K and V of every block and layer: two tensors `[layers, num_blocks + 1, block_size, kv_heads, head_dim]`.

    They are allocated once and not cleared: what a slot holds means something only after `write`. (On a CPU the
    operating system hands out the pages when they are first written, so an unused cache costs no memory.) Only the last
    block, `zero_block`, is cleared and never written: it stands in a kernel's table where a block was given back.

    The swap space has `num_host_blocks` blocks of the same form on the host: memory, pinned where the cache is on CUDA,
    or, with `swap_file`, that file, mapped: see `SwapFile`, and what it raises.
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
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self.zero_block = num_blocks
        block = (block_size, kv_heads, head_dim)
        self.keys = torch.empty((num_layers, num_blocks + 1, *block), dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.keys[:, self.zero_block] = 0
        self.values[:, self.zero_block] = 0
        # [layers · blocks, elements of a block]: block b of layer l is row l · (num_blocks + 1) + b.
        self._rows = tuple(cache.view(num_layers * (num_blocks + 1), -1) for cache in (self.keys, self.values))
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.keys, self.values, strict=True)]
        shape = (2, num_layers, num_host_blocks, *block)
        num_bytes = math.prod(shape) * dtype.itemsize
        # Kept for its lock: the file is ours while the storage lives.
        self._swap_file = SwapFile(swap_file, num_bytes) if swap_file is not None and num_bytes else None
        self.host = _host_memory(shape, dtype, self.keys.device, self._swap_file)  # K and V
        self._host_rows = tuple(self.host.flatten(1, 2).flatten(2).unbind(0))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` `[tokens, kv_heads, head_dim]` of `layer` in `slots` (int64 `[tokens]`). In place.

        Slot s is place s % block_size of block s // block_size.
        """
        keys, values = self._slots[layer]  # [slots, kv_heads, head_dim]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def apply(self, transfers: Iterable[Transfer]) -> None:
        """Copy blocks as `transfers` say, in their order, over all layers. Changes the destinations alone."""
        for transfer in transfers:
            if transfer.pairs:
                self._apply(transfer)

    def _apply(self, transfer: Transfer) -> None:
        device = self._rows[0].device
        sources, destinations = torch.tensor(transfer.pairs, dtype=torch.int64).unbind(1)
        within, host = self.num_blocks + 1, self.num_host_blocks
        for rows, host_rows in zip(self._rows, self._host_rows, strict=True):
            match transfer.kind:
                case "copy" | "move":
                    self._copy(rows, within, sources.to(device), rows, within, destinations.to(device))
                case "swap_out":
                    self._copy(rows, within, sources.to(device), host_rows, host, destinations)
                case "swap_in":
                    self._copy(host_rows, host, sources, rows, within, destinations.to(device))

    def _copy(
        self, source: Tensor, from_stride: int, from_blocks: Tensor, target: Tensor, to_stride: int, to_blocks: Tensor
    ) -> None:
        """Copy blocks of all layers from `source` to `target`, each `[layers · stride, elements]`.

        Some layers at a time, to bound the copy between; within a layer all sources are read before a destination is
        written, and layers share no block.
        """
        layers = len(self.keys)
        at_once = max(1, TEMPORARY_BYTES // (len(from_blocks) * source.shape[1] * source.element_size()))
        for first in range(0, layers, at_once):
            chunk = torch.arange(first, min(first + at_once, layers))[:, None]
            from_rows = (chunk.to(from_blocks.device) * from_stride + from_blocks).flatten()
            to_rows = (chunk.to(to_blocks.device) * to_stride + to_blocks).flatten()
            target.index_copy_(0, to_rows, source.index_select(0, from_rows).to(target.device))


def _host_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, swap_file: SwapFile | None
) -> Tensor:
    if swap_file is not None:
        return torch.frombuffer(swap_file.bytes, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda" and math.prod(shape) > 0)
