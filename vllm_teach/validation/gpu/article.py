"""The articles' workload, one attention layer at sequence length 2,048 and hidden size 2,048, naive and flash.

The articles name no batch, so several are measured; time and peak memory are, the bytes behind a bandwidth are not:
they are counted by `attention.traffic` from each algorithm's loop, which is why that figure is called modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vllm_teach.attention.patterns import BlockSparsePattern
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.traffic import naive_traffic, tiled_traffic
from vllm_teach.performance.memory import peak_memory
from vllm_teach.validation.gpu.clock import measure
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.rivals import naive, rivals
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting
from vllm_teach.validation.gpu.times import flops

_HEAD_DIM = 128
_WINDOW = 512
_BLOCK = 256


def article_items(setting: Setting) -> list[Item]:
    """Return one item per (sequence length, batch), the articles' own length first."""
    full = [(2048, 1), (2048, 2), (2048, 4), (2048, 8), (4096, 1), (4096, 4)]
    shapes = setting.pick(full, [(2048, 1), (2048, 8)], [(40, 1)])
    return [Item(f"n={n}, batch {batch}", partial(article_shape, setting, n, batch)) for n, batch in shapes]


def article_shape(setting: Setting, length: int, batch: int) -> list[Record]:
    """Measure every mode of the articles' tables on one shape, without a causal mask as their formula has none."""
    heads, head_dim = setting.pick((16, _HEAD_DIM), (16, _HEAD_DIM), (2, 16))
    dtype = torch.float32 if setting.dry else torch.float16
    q, k, v = setting.qkv(batch, length, heads, head_dim, dtype=dtype)
    shape = AttentionShape(batch, length, length, heads, heads, head_dim)
    work = flops(batch, heads, length, head_dim, causal=False)
    sdpa = "sdpa math" if setting.dry else "sdpa flash"
    modes: dict[str, tuple[Callable[[], object], float]] = {  # the call, and the share of the pairs it computes
        "naive": (partial(naive, q, k, v, False), 1.0),
        "triton": (partial(rivals(setting.device)["triton"], q, k, v, False), 1.0),
        sdpa: (partial(rivals(setting.device)[sdpa], q, k, v, False), 1.0),
        **_sparse_modes(setting, q, k, v),
    }
    records: list[Record] = []
    for mode, (call, share) in modes.items():
        figures = measure(call, setting.device, setting.repeats)
        record = {
            "kind": "time", "name": f"n={length}, batch {batch}", "implementation": mode, "n": length, "batch": batch,
            "heads": heads, "head_dim": head_dim, "dtype": str(dtype), "share_of_pairs": share, **figures,
            "peak_memory_bytes": peak_memory(call, setting.device),
            "tflops": round(work * share / figures["median_ms"] / 1e9, 3),
        }  # fmt: skip
        if share == 1.0:
            moved = _modelled_bytes(shape, q.element_size(), mode == "naive")
            record |= {"modelled_bytes": moved, "modelled_gb_per_s": round(moved / figures["median_ms"] / 1e6, 1)}
        records.append(record)
    return records


def _sparse_modes(
    setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, tuple[Callable[[], object], float]]:
    """The second article's sparse modes: half of all blocks of 256, and a window of 512 keys around each query."""
    from vllm_teach.backends import triton_backend
    from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
    from vllm_teach.kernels.triton_kernels.problem import Options

    length = q.shape[1]
    block = setting.pick(_BLOCK, _BLOCK, 16)
    blocks = -(-length // block)
    half = BlockSparsePattern([[(row + column) % 2 == 0 for column in range(blocks)] for row in range(blocks)], block)
    reach = setting.pick(_WINDOW, _WINDOW, 8) // 2
    band = Options(left=reach, right=reach - 1)
    window_share = sum(min(i + reach, length) - max(i - reach, 0) for i in range(length)) / length**2
    return {
        "block-sparse, half": (partial(triton_backend.run, q, k, v, pattern=half), half.density(length, length)),
        "window of 512": (partial(flash_attention, q, k, v, band), window_share),
    }


def _modelled_bytes(shape: AttentionShape, element_bytes: int, is_naive: bool) -> int:
    sizes = {**vars(shape), "input_bytes": element_bytes}
    tally = naive_traffic(**sizes) if is_naive else tiled_traffic(**sizes, tile_q=128, tile_k=64)
    return tally.bytes_moved
