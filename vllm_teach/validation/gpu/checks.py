"""Is every Triton kernel right on this GPU? The conformance table, and each tile that the tuning may choose.

FlashAttention's rule: against float64, at most twice the error of the plain formula in the same dtype (gradients three
times). The kernels compile here for the first time, which takes longer than running them: hence several processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from vllm_teach.backends.conformance import ROWS, Row, check_forward, check_gradients
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting

# The tiles of these cases are timed later, so they are checked, and thereby compiled, first.
_TIMED = [(64, torch.bfloat16), (128, torch.bfloat16)]
_OTHERS = [(128, torch.float16), (256, torch.bfloat16), (128, torch.float32), (64, torch.float32)]


def tile_items(setting: Setting) -> list[Item]:
    """Return a check of every candidate tile of every kernel; in a dry run, of the interpreter's one."""
    from vllm_teach.kernels.triton_kernels import tuning
    from vllm_teach.validation.gpu import tile_checks

    cases = setting.pick([*_TIMED, *_OTHERS], _TIMED, [(16, torch.float32)])
    return [
        Item(f"{kernel} {tile}, head_dim {head_dim}, {dtype}", partial(check, setting, head_dim, dtype, tile))
        for head_dim, dtype in cases
        for kernel, check in tile_checks.CHECKS.items()
        for tile in tuning.candidates(kernel, head_dim, dtype)
    ]


def row_items(setting: Setting) -> list[Item]:
    """Return a check of each row of the conformance table that the kernels support, gradients included."""
    from vllm_teach.backends import triton_backend

    rows = [row for row in ROWS if triton_backend.supports(replace(row.spec(), device=setting.device)) is None]
    rows = setting.pick(rows, rows[::3], _sample(rows))
    return [Item(f"row {row.name}", partial(check_row, row.name, setting.device)) for row in rows]


def other_items(setting: Setting) -> list[Item]:
    """Return the checks that belong to no table."""
    return [
        Item("online_softmax", partial(check_online_softmax, setting)),
        Item("same bits twice", partial(check_determinism, setting)),
    ]


def check_row(name: str, device: str) -> list[Record]:
    """Check one row of the table with the default tiles; raises AssertionError, with the numbers, when it is off."""
    from vllm_teach.backends import triton_backend

    row = next(row for row in ROWS if row.name == name)
    with default_tiles():
        check_forward(triton_backend.run, row, device)
        spec = replace(row.spec(requires_grad=True), device=device)
        back = row.has_gradients and triton_backend.supports(spec) is None
        if back:
            check_gradients(triton_backend.run, row, device)
    return [{"kind": "check", "name": f"row {name}", "passed": True, "gradients": back}]


def check_online_softmax(setting: Setting) -> list[Record]:
    """Check the softmax kernel against its specification, rows of -inf and of NaN included."""
    from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax, online_softmax_spec

    dtypes = setting.pick([torch.float16, torch.bfloat16, torch.float32], [torch.bfloat16], [torch.float32])
    records = []
    for dtype in dtypes:
        x = setting.randn(setting.pick(37, 37, 5), setting.pick(5000, 5000, 70), dtype=dtype) * 10
        x[0], x[1, 7], x[2, -1] = -torch.inf, torch.nan, torch.inf
        error = (online_softmax(x, tile=setting.pick(1024, 1024, 32)).double() - online_softmax_spec(x).double()).abs()
        broken = error.isnan().any(dim=1).nonzero().flatten().tolist()
        worst, allowed = float(error.nan_to_num(0.0).max()), 4 * torch.finfo(dtype).eps
        records.append(compared(f"online_softmax, {dtype}", worst if broken == [1, 2] else 1.0, allowed))
    return records


def check_determinism(setting: Setting) -> list[Record]:
    """Check that the same call gives the same bits, out and gradients."""
    from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
    from vllm_teach.kernels.triton_kernels.problem import Options

    length = setting.pick(2048, 2048, 40)
    q, k, v = (x.requires_grad_() for x in setting.qkv(2, length, 4, setting.pick(128, 128, 16)))
    runs = []
    with default_tiles():
        for _ in range(2):
            out, lse = flash_attention(q, k, v, Options(right=0))
            runs.append((out, lse, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    differing = sum(int((a != b).sum()) for a, b in zip(*runs, strict=True))
    return [{"kind": "check", "name": "same bits twice", "passed": differing == 0, "differing_elements": differing}]


def compared(name: str, error: float, allowed: float) -> Record:
    """Return the record of a check of one error against what is allowed; JSON has no NaN, which becomes 1e30."""
    error = error if math.isfinite(error) else 1e30
    return {"kind": "check", "name": name, "passed": error <= allowed, "error": error, "allowed": allowed}


def agreeing(name: str, found: torch.Tensor, other: torch.Tensor) -> Record:
    """Return the check that two implementations differ by no more than two roundings of the largest number."""
    largest = max(float(found.abs().max()), 1.0)
    allowed = max(2 * torch.finfo(found.dtype).eps * largest, 1e-5)
    return compared(name, float((found.float() - other.float()).abs().max()), allowed)


@contextmanager
def default_tiles() -> Iterator[None]:
    """Within it, kernels take their default tiles and time nothing."""
    from vllm_teach.kernels.triton_kernels.tuning import SWITCH

    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def _sample(rows: Sequence[Row]) -> list[Row]:
    """One small row for each kind of call."""
    small = [row for row in rows if max(max(pair) for pair in row.lengths) <= 70]
    kinds = {(row.layout, row.pattern is not None, row.dropout_p > 0): row for row in small[::-1]}
    return list(kinds.values())[::-1]
