"""A plan as flat arrays: all scheduled tokens behind one another, without padding, and where their K and V lie.

Everything here is made once a step and serves all layers. A sequence costs a few operations, a token none of its own:
the rest is arithmetic on whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vllm_teach.attention.layout import Paged
from vllm_teach.engine.plan import Plan
from vllm_teach.engine.request import Sequence


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one step, and the rows whose next token is to be drawn.

    - `token_ids`, `positions`, `slots`: int64 `[tokens]`; slot s is place s % block_size of block s // block_size.
    - `layout`: whose tokens they are and which blocks each sequence reads; a given-back block is the zero block.
    - `sampled_rows`: int64 `[drawn rows]`, or None where those are all rows, as when everybody decodes.
    - `sequences`: who draws a token; `sources`: for each the drawn row it draws from, or None where each has its own.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    layout: Paged
    sampled_rows: Tensor | None
    sequences: list[Sequence]
    sources: Tensor | None

    @classmethod
    def of(cls, plan: Plan, block_size: int, zero_block: int, device: torch.device) -> Batch:
        """Return the batch of `plan`, which is not empty and whose sequences have blocks for all their tokens."""
        items = plan.items
        counts = np.array([item.num_tokens for item in items])
        starts = np.array([item.start for item in items])
        ends = np.cumsum(counts)  # of each item's rows
        table = _table(plan, -(-(starts + counts) // block_size), zero_block)
        owner = np.repeat(np.arange(len(items)), counts)  # [tokens], the item of each
        positions = np.arange(ends[-1]) - (ends - counts - starts)[owner]
        slots = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        tokens = chain.from_iterable(item.sequence.tokens(item.start, item.num_tokens) for item in items)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        rows, sequences, sources = _drawn(plan, ends)
        every = len(rows) == len(positions)
        return cls(
            token_ids=tensor(np.fromiter(tokens, np.int64, len(positions))),
            positions=tensor(positions),
            slots=tensor(slots),
            layout=Paged(
                cu_seqlens_q=tensor(np.concatenate(([0], ends)).astype(np.int32)),
                block_table=tensor(table),
                kv_lens=tensor((starts + counts).astype(np.int32)),
            ),
            sampled_rows=None if every else tensor(np.array(rows, dtype=np.int64)),
            sequences=sequences,
            sources=None if len(sequences) == len(rows) else tensor(np.array(sources)),
        )


def _table(plan: Plan, widths: np.ndarray, zero_block: int) -> np.ndarray:
    """Return the block tables, int32 `[items, widest]`, cut to `widths`; the zero block is behind and in gaps."""
    width = int(widths.max())
    table = np.full((len(widths), width), zero_block, dtype=np.int32)
    held = np.arange(width) < widths[:, None]
    blocks = chain.from_iterable(item.blocks[:n] for item, n in zip(plan.items, widths.tolist(), strict=True))
    table[held] = np.fromiter(blocks, np.int32, int(widths.sum()))
    table[table < 0] = zero_block  # NO_BLOCK
    return table


def _drawn(plan: Plan, ends: np.ndarray) -> tuple[list[int], list[Sequence], list[int]]:
    """Return the rows to draw from, who draws, and for each of these the index of its row.

    Only a sequence's last known token predicts something new; its forks draw from the same row.
    """
    rows: list[int] = []
    sequences: list[Sequence] = []
    sources: list[int] = []
    for item, end in zip(plan.items, ends.tolist(), strict=True):
        if item.samples:
            drawing = (item.sequence, *item.sequence.forks)
            sequences += drawing
            sources += [len(rows)] * len(drawing)
            rows.append(end - 1)
    return rows, sequences, sources
