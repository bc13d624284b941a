"""Sequences in memory: as a dense batch, behind one another, or scattered over the blocks of a cache; and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_teach.attention.layout import Layout, Paged, Varlen

_NOWHERE = -1  # what a block table holds behind a sequence's last block


class Sequence(NamedTuple):
    """One sequence without batch: q `[q_len, q_heads, head_dim]`, k and v `[kv_len, kv_heads, head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Packed(NamedTuple):
    """q, k, v and the layout that says where the sequences lie in them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Layout | None


def pack_dense(sequences: list[Sequence], block_size: int | None = None) -> Packed:
    """Stack sequences of equal lengths: `[batch, length, heads, head_dim]`."""
    q, k, v = (torch.stack(parts) for parts in zip(*sequences, strict=True))
    return Packed(q, k, v, None)


def pack_varlen(sequences: list[Sequence], block_size: int | None = None) -> Packed:
    """Put sequences behind one another: `[total, heads, head_dim]`."""
    q, k, v = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    return Packed(q, k, v, Varlen(_starts([one.q for one in sequences]), _starts([one.k for one in sequences])))


def pack_paged(sequences: list[Sequence], block_size: int | None) -> Packed:
    """Scatter the keys over shuffled blocks of `block_size`; NaN and -1 stand where no sequence has anything.

    k and v become `[num_blocks, block_size, kv_heads, head_dim]`, with one block more than is needed.
    """
    assert block_size is not None
    counts = [-(-len(one.k) // block_size) for one in sequences]
    free = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(sequences), max(counts) + 1), _NOWHERE, dtype=torch.int32)
    k, v = (sequences[0].k.new_full((len(free), block_size, *sequences[0].k.shape[1:]), torch.nan) for _ in "kv")
    for index, (one, count) in enumerate(zip(sequences, counts, strict=True)):
        for logical in range(count):
            block = free.pop()
            table[index, logical] = block
            keys = slice(logical * block_size, min((logical + 1) * block_size, len(one.k)))
            k[block, : keys.stop - keys.start], v[block, : keys.stop - keys.start] = one.k[keys], one.v[keys]
    kv_lens = torch.tensor([len(one.k) for one in sequences], dtype=torch.int32)
    return Packed(
        torch.cat([one.q for one in sequences]), k, v, Paged(_starts([one.q for one in sequences]), table, kv_lens)
    )


PACKERS: dict[str, Callable[[list[Sequence], int | None], Packed]] = {
    "dense": pack_dense,
    "varlen": pack_varlen,
    "paged": pack_paged,
}


def moved(layout: Layout | None, device: torch.device | str) -> Layout | None:
    """Return the layout with its tensors on `device`."""
    return None if layout is None else type(layout)(**{name: part.to(device) for name, part in vars(layout).items()})


def _starts(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([0, *(len(part) for part in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
