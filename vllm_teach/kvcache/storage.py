"""The tensors of the KV cache. Which slot belongs to whom is the manager's business."""

from __future__ import annotations

import torch
from torch import Tensor


class KVStorage:
    """K and V of every slot and layer: two tensors `[layers, num_slots, kv_heads, head_dim]`.

    They are allocated once and not cleared: a slot's content means something only after `write`. (On a CPU the
    operating system hands out the pages when they are first written, so an unused cache costs no memory.)
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_slots, kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` `[tokens, kv_heads, head_dim]` of `layer` in `slots` (int64 `[tokens]`). In place."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def view(self, layer: int, first_slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return K and V `[num_tokens, kv_heads, head_dim]` of a contiguous run, without copying."""
        run = slice(first_slot, first_slot + num_tokens)
        return self.keys[layer, run], self.values[layer, run]
