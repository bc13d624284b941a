"""Does the time follow the density? Block-sparse patterns against the same kernel on all pairs, and local windows."""

from __future__ import annotations

from functools import partial

import torch

from vllm_teach.attention.patterns import BlockSparsePattern
from vllm_teach.attention.patterns.base import TileKind
from vllm_teach.attention.patterns.tile_csr import tile_csr
from vllm_teach.kernels.triton_kernels.block_sparse_forward import TileLists, block_sparse_attention
from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
from vllm_teach.kernels.triton_kernels.problem import Options
from vllm_teach.kernels.triton_kernels.tuning import candidates
from vllm_teach.validation.gpu.clock import measure
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.rivals import rivals
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting


def density_items(setting: Setting) -> list[Item]:
    """Return one item per share of the blocks that are visible."""
    shares = setting.pick((1.0, 0.5, 0.25, 0.125, 0.0625), (1.0, 0.25), (1.0, 0.25))
    return [Item(f"block-sparse, {share:.4g} of the blocks", partial(time_density, setting, share)) for share in shares]


def window_items(setting: Setting) -> list[Item]:
    """Return one item per length: a causal window of 512 keys against the full causal mask."""
    lengths = setting.pick((8192, 16_384, 4096), (8192,), (40,))
    return [Item(f"window, n={length}", partial(time_window, setting, length)) for length in lengths]


def time_density(setting: Setting, share: float) -> list[Record]:
    """Time each candidate tile on a random pattern of that density, and the dense kernels on all pairs."""
    length, heads, head_dim, block = setting.pick((8192, 16, 128, 256), (8192, 16, 128, 256), (64, 2, 16, 16))
    q, k, v = setting.qkv(1, length, heads, head_dim)
    blocks = length // block
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0))
    layout = drawn <= drawn.flatten().kthvalue(max(1, round(share * blocks**2))).values  # exactly that share
    pattern = BlockSparsePattern(layout, block)
    density = pattern.density(length, length)
    name = f"block-sparse, {share:.4g} of the blocks, n={length}"
    shape = {"n": length, "heads": heads, "head_dim": head_dim, "block": block, "density": density}
    dense = {
        rival: partial(attention, q, k, v, False)
        for rival, attention in rivals(setting.device).items()
        if rival in ("triton", "sdpa flash", "sdpa math")
    }
    records: list[Record] = [
        {"kind": "time", "name": name, "implementation": f"{rival}, all pairs", **shape, "density": 1.0,
         **measure(call, setting.device, setting.repeats)}
        for rival, call in dense.items()
    ]  # fmt: skip
    for tile in candidates("block_sparse", head_dim, setting.dtype):
        csr = tile_csr(pattern, length, length, tile.q, tile.k)
        lists = TileLists.of(csr.row_ptr, csr.k_tile, csr.kind == TileKind.FULL, csr.mask_index, csr.masks, q.device)
        figures = measure(partial(block_sparse_attention, q, k, v, lists), setting.device, setting.repeats)
        records.append({"kind": "time", "name": name, "implementation": f"triton, tile {tile}", **shape, **figures})
    return records


def time_window(setting: Setting, length: int) -> list[Record]:
    """Time the kernel with a window of 512 keys, a query's own included, and without."""
    heads, head_dim, window = setting.pick((16, 128, 512), (16, 128, 512), (2, 16, 8))
    q, k, v = setting.qkv(1, length, heads, head_dim)
    shape = {"n": length, "heads": heads, "head_dim": head_dim, "window": window}
    records: list[Record] = []
    for implementation, options in (
        ("triton, full causal", Options(right=0)),
        (f"triton, causal window of {window}", Options(left=window - 1, right=0)),
    ):
        figures = measure(partial(flash_attention, q, k, v, options), setting.device, setting.repeats)
        records.append(
            {"kind": "time", "name": f"window, n={length}", "implementation": implementation, **shape, **figures}
        )
    return records
