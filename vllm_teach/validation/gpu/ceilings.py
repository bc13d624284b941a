"""What the GPU attains at best, measured and not read off a data sheet: matrix products and memory traffic."""

from __future__ import annotations

from functools import partial

import torch

from vllm_teach.validation.gpu.clock import measure
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting


def ceiling_items(setting: Setting) -> list[Item]:
    """Return the two measurements."""
    return [Item("matrix product", partial(matrix_rate, setting)), Item("copy", partial(copy_rate, setting))]


def matrix_rate(setting: Setting) -> list[Record]:
    """TFLOP/s of a square matrix product of random numbers, which draw more power than zeros."""
    n = setting.pick(8192, 8192, 64)
    a, b = setting.randn(n, n, seed=0), setting.randn(n, n, seed=1)
    figures = measure(lambda: torch.mm(a, b), setting.device, setting.repeats)
    tflops = 2 * n**3 / figures["median_ms"] / 1e9
    return [{"kind": "rate", "name": "matrix product", "n": n, "dtype": str(a.dtype), "tflops": tflops, **figures}]


def copy_rate(setting: Setting) -> list[Record]:
    """GB/s of a copy within the GPU's memory, bytes read plus bytes written."""
    nbytes = setting.pick(2 << 30, 1 << 30, 1 << 16)
    source = torch.ones(nbytes, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    figures = measure(lambda: target.copy_(source), setting.device, setting.repeats)
    rate = 2 * nbytes / figures["median_ms"] / 1e6
    return [{"kind": "rate", "name": "copy", "bytes": nbytes, "gb_per_s": rate, **figures}]
