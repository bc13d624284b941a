"""What it costs attention to read a sequence's blocks: one run, read as a view, beside blocks that lie anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Paged
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.side_by_side import race

PLACES = ("one run", "scattered")


@dataclass(frozen=True)
class PagedRead:
    """Seconds of a decode step's attention in one layer, by block size, with the blocks in one run and scattered.

    `ratios[i]` is scattered / one run at `block_sizes[i]`, the median of the rounds' own ratios.
    """

    backend: str
    block_sizes: tuple[int, ...]
    one_run: tuple[float, ...]
    scattered: tuple[float, ...]
    ratios: tuple[float, ...]


def decode_call(
    kv_len: int, block_size: int, sequences: int, place: str, heads: tuple[int, int] = (9, 3), head_dim: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Paged]:
    """Return q, k, v and the layout of one decode step: `sequences` queries, each over `kv_len` keys of its own.

    `heads` is (q_heads, kv_heads). The blocks lie in a cache with as many blocks again; `place` is one of PLACES. The
    numbers are random and float32, the same for the same arguments. Raises InvalidArgumentError for another place.
    """
    if place not in PLACES:
        raise InvalidArgumentError(f"place={place!r} is not known: give one of {', '.join(PLACES)}.")
    source = torch.Generator().manual_seed(0)
    needed = -(-kv_len // block_size)
    num_blocks = 2 * sequences * needed
    q_heads, kv_heads = heads
    q = torch.randn(sequences, q_heads, head_dim, generator=source)
    k, v = (torch.randn(num_blocks, block_size, kv_heads, head_dim, generator=source) for _ in range(2))
    order = torch.randperm(num_blocks, generator=source) if place == "scattered" else torch.arange(num_blocks)
    table = order[: sequences * needed].view(sequences, needed).to(torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    return q, k, v, Paged(starts, table, torch.full((sequences,), kv_len, dtype=torch.int32))


def measure_paged_reads(
    backend: str, kv_len: int, block_sizes: Sequence[int], sequences: int = 4, rounds: int = 9
) -> PagedRead:
    """Time `backend` on `decode_call`: in each round every block size with both placements, one after the other."""
    runners = {}
    for size in block_sizes:
        for place in PLACES:
            q, k, v, layout = decode_call(kv_len, size, sequences, place)
            call = partial(backends.attend, q, k, v, backend=backend, layout=layout, causal=True)
            runners[_name(size, place)] = call
    found = race(runners, next(iter(runners)), rounds=rounds, warmup=2).seconds
    one_run, scattered = ([found[_name(size, place)] for size in block_sizes] for place in PLACES)
    pairs = [zip(b.samples, a.samples, strict=True) for a, b in zip(one_run, scattered, strict=True)]
    return PagedRead(
        backend,
        tuple(block_sizes),
        tuple(timing.median for timing in one_run),
        tuple(timing.median for timing in scattered),
        tuple(statistics.median(there / here for there, here in pair) for pair in pairs),
    )


def _name(block_size: int, place: str) -> str:
    return f"block size {block_size}, {place}"
