"""Decode steps over a paged cache: one query per sequence, so what counts is how fast the keys and values are read."""

from __future__ import annotations

from functools import partial

import torch

from vllm_teach.kernels.triton_kernels.paged_decode import paged_attention
from vllm_teach.validation.gpu.checks import agreeing
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.rivals import rivals
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting
from vllm_teach.validation.gpu.times import timed

_BLOCK_SIZE = 16


def decode_items(setting: Setting) -> list[Item]:
    """Return one item per (batch, cached tokens of each sequence)."""
    full = [(batch, kv_len) for batch in (8, 64, 1) for kv_len in (4096, 1024, 16_384)]
    shapes = setting.pick(full, [(8, 4096), (1, 16_384)], [(2, 40)])
    return [
        Item(f"decode, batch {batch}, {kv_len} cached", partial(time_decode, setting, batch, kv_len))
        for batch, kv_len in shapes
    ]


def time_decode(setting: Setting, batch: int, kv_len: int) -> list[Record]:
    """Time ours with one split, with as many as it chooses, and others over the same keys without blocks."""
    name = f"decode, batch {batch}, {kv_len} cached"
    q_heads, kv_heads, head_dim = setting.pick((32, 8, 128), (32, 8, 128), (4, 2, 16))
    blocks = -(-kv_len // _BLOCK_SIZE)
    cache_bytes = 2 * batch * kv_len * kv_heads * head_dim * 2  # keys and values, two bytes each
    if not setting.has_room(2 * cache_bytes):  # the cache, and the same keys without blocks
        return [{"kind": "skipped", "name": name, "implementation": "all", "reason": "The GPU has too little memory."}]
    q = setting.randn(batch, 1, q_heads, head_dim)
    k, v = (setting.randn(batch, blocks * _BLOCK_SIZE, kv_heads, head_dim, seed=seed) for seed in (1, 2))
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).to(setting.device)
    caches = [torch.empty_like(x).view(-1, _BLOCK_SIZE, kv_heads, head_dim) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[order] = x.view(-1, _BLOCK_SIZE, kv_heads, head_dim)  # logical block i lies at order[i]
    table = order.to(torch.int32).view(batch, blocks)
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=setting.device)
    paged = partial(paged_attention, q[:, 0], *caches, table, kv_lens, kv_len=kv_len)
    k, v = k[:, :kv_len], v[:, :kv_len]

    calls = {"triton": partial(paged), "triton, one split": partial(paged, splits=1)}
    calls |= {
        f"{rival}, no blocks": partial(attention, q, k, v, False)
        for rival, attention in rivals(setting.device).items()
        if rival != "xformers"  # which has no grouped heads in this layout
    }
    ours = paged()[0]
    records: list[Record] = []
    for implementation, call in calls.items():
        record = timed(setting, implementation, name, call, own=implementation.startswith("triton"))
        if record["kind"] == "time":
            rate = cache_bytes / record["median_ms"] / 1e6
            record |= {"batch": batch, "kv_len": kv_len, "dtype": str(setting.dtype), "gb_per_s": round(rate, 1)}
        records.append(record)
    reference = calls["triton, no blocks"]()[:, 0]
    records.append(agreeing(f"{name}: with and without blocks", ours, reference))
    return records
