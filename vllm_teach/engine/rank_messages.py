"""What rank 0 tells the other ranks of a tensor-parallel engine. All of it can be pickled.

They know no requests: a step comes to them as block copies and arrays, and the sampling stays with rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_teach.attention.layout import Paged
from vllm_teach.engine.batch import Batch
from vllm_teach.kvcache.transfers import Transfer


@dataclass(frozen=True, slots=True)
class MakeCache:
    """Make a KV cache of as many blocks as rank 0's. To be answered, with what went wrong."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Copy blocks as `transfers` say, then compute a batch, whose arrays are those of `Batch` and its layout."""

    transfers: tuple[Transfer, ...]
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    cu_seqlens_q: np.ndarray
    block_table: np.ndarray
    kv_lens: np.ndarray

    @classmethod
    def of(cls, transfers: tuple[Transfer, ...], batch: Batch) -> Forward:
        """Return the message that stands for `batch`."""
        layout = batch.layout
        tensors = (
            batch.token_ids,
            batch.positions,
            batch.slots,
            layout.cu_seqlens_q,
            layout.block_table,
            layout.kv_lens,
        )
        return cls(transfers, *(tensor.numpy(force=True) for tensor in tensors))

    def batch(self, device: torch.device) -> Batch:
        """Return the batch, from which nobody draws here."""
        arrays = (self.token_ids, self.positions, self.slots, self.cu_seqlens_q, self.block_table, self.kv_lens)
        token_ids, positions, slots, *layout = (torch.from_numpy(array).to(device) for array in arrays)
        return Batch(token_ids, positions, slots, Paged(*layout), sampled_rows=None, sequences=[], sources=None)


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute this rank's part of the logits of `num_rows` hidden states, which rank 0 broadcasts next."""

    num_rows: int


@dataclass(frozen=True, slots=True)
class WhatFailed:
    """Answer why the last forward pass or logits failed on this rank; nothing if they did not."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""
