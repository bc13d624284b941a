"""Which tiles the tuning chose, what each candidate took, and whether the articles' tile for an H100 runs at all."""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import torch

from vllm_teach.kernels.triton_kernels import tuning
from vllm_teach.kernels.triton_kernels.flash_forward import flash_forward
from vllm_teach.kernels.triton_kernels.problem import Options, Problem
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting


def tile_time_items(setting: Setting) -> list[Item]:
    """Return an item that lists the choices made so far, and one that tries the articles' 256x256."""
    articles = [tuning.Tile(256, 256, warps, 1) for warps in setting.pick((8, 16), (8,), ())]
    return [
        Item("choices", choices),
        *(Item(f"the articles' tile {tile}", partial(time_tile, setting, tile)) for tile in articles),
    ]


def choices() -> list[Record]:
    """Return one record per candidate of every choice: its milliseconds or why it does not fit."""
    return [
        {
            "kind": "tile", "name": f"{choice.kernel}, head_dim {choice.head_dim}, {choice.dtype}",
            "kernel": choice.kernel, "head_dim": choice.head_dim, "dtype": choice.dtype, "causal": choice.causal,
            "tile": str(tile), "chosen": tile == choice.tile,
            "median_ms": found if isinstance(found, float) else None,
            "does_not_fit": found if isinstance(found, str) else None,
        }
        for choice in tuning.choices()
        for tile, found in choice.tried.items()
    ]  # fmt: skip


def time_tile(setting: Setting, tile: tuning.Tile) -> list[Record]:
    """Try one tile of the forward kernel on the workload of the tuning, head_dim 128, causal."""
    q, k, v = setting.qkv(2, 4096, 16, 128)
    problem = Problem.of(q, k, v, Options(right=0))
    with redirect_stdout(StringIO()):  # where a tile needs too many registers, Triton prints the whole program
        found = tuning.milliseconds(lambda one: flash_forward(problem, one), tile)
    return [
        {
            "kind": "tile", "name": "the articles' tile for an H100", "kernel": "forward", "head_dim": 128,
            "dtype": str(torch.bfloat16), "causal": True, "tile": str(tile), "chosen": False,
            "median_ms": found if isinstance(found, float) else None,
            "does_not_fit": found if isinstance(found, str) else None,
        }
    ]  # fmt: skip
