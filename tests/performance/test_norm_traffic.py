"""The counts of a norm's bytes against what PyTorch was asked for as it ran, and against a pencil."""

import pytest
import torch
import torch.nn.functional as F

from vllm_teach.counters import Tally, Work
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.norm_traffic import (
    KINDS,
    fused_traffic,
    op_by_op_norm,
    op_by_op_traffic,
    traced_traffic,
)

SIZES = ((1, 1), (3, 7), (64, 576))
DTYPES = {torch.float32: 4, torch.bfloat16: 2}


def as_work(tally: Tally) -> Work:
    return Work(tally.flops, tally.bytes_read, tally.bytes_written)


def tensors(rows, size, dtype):
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight, bias = torch.randn(2, size).to(dtype)
    return x, residual, weight, bias


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_the_formula_counts_what_pytorch_was_asked_for(rows, size, dtype, kind, residual):
    x, other, weight, bias = tensors(rows, size, dtype)
    added = other if residual else None
    has_bias = kind == "layer_norm"
    trace = traced_traffic(lambda: op_by_op_norm(kind, x, weight, bias if has_bias else None, added))
    formula = op_by_op_traffic(kind=kind, rows=rows, size=size, input_bytes=DTYPES[dtype], residual=residual)
    assert as_work(trace) == as_work(formula)


def test_without_a_bias_there_is_one_operation_less():
    x, _, weight, _ = tensors(5, 8, torch.float32)
    trace = traced_traffic(lambda: op_by_op_norm("layer_norm", x, weight))
    formula = op_by_op_traffic(kind="layer_norm", rows=5, size=8, input_bytes=4, bias=False)
    assert as_work(trace) == as_work(formula)
    assert "+ bias" not in formula.by_name


@pytest.mark.parametrize("kind", KINDS)
def test_operation_by_operation_it_is_the_norm(kind):
    x, residual, weight, bias = tensors(4, 50, torch.float32)
    total = (x + residual).double()
    if kind == "layer_norm":
        exact = F.layer_norm(total, (50,), weight.double(), bias.double())
        found = op_by_op_norm(kind, x, weight, bias, residual)
    else:
        exact = F.rms_norm(total, (50,), weight.double(), eps=1e-5)
        found = op_by_op_norm(kind, x, weight, residual=residual)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorchs_own_kernel_moves_what_a_fused_one_must_and_its_statistics(dtype):
    x, residual, weight, bias = tensors(64, 96, dtype)
    fused = fused_traffic(kind="layer_norm", rows=64, size=96, input_bytes=DTYPES[dtype])
    trace = traced_traffic(lambda: F.layer_norm(x, (96,), weight, bias))
    statistics = trace.bytes_written - fused.bytes_written
    assert trace.bytes_read == fused.bytes_read
    assert statistics in (2 * 64 * DTYPES[dtype], 2 * 64 * 4)  # mean and 1 / deviation of each row
    # With the sum before it, it is two kernels: the sum is written once and read once more.
    both = fused_traffic(kind="layer_norm", rows=64, size=96, input_bytes=DTYPES[dtype], residual=True)
    trace = traced_traffic(lambda: F.layer_norm(x + residual, (96,), weight, bias))
    assert trace.bytes_moved - statistics == both.bytes_moved + x.nbytes


def test_with_a_pencil():
    """1,000 rows of 1,000 float32: twelve passes of 4 MB become two; the rest is small."""
    sizes = {"kind": "layer_norm", "rows": 1000, "size": 1000, "input_bytes": 4}
    eager, fused = op_by_op_traffic(**sizes), fused_traffic(**sizes)
    row, parameter = 4000, 4000
    assert eager.bytes_read == 7 * 4_000_000 + 4 * row + 2 * parameter
    assert eager.bytes_written == 5 * 4_000_000 + 4 * row
    assert fused.bytes_moved == 2 * 4_000_000 + 2 * parameter
    assert 5.9 < eager.bytes_moved / fused.bytes_moved < 6.1


@pytest.mark.parametrize(
    ("kind", "residual", "passes"),
    [("layer_norm", False, 2), ("layer_norm", True, 3), ("rms_norm", False, 1), ("rms_norm", True, 2)],
)
def test_a_row_beyond_the_fast_memory_is_read_again(kind, residual, passes):
    sizes = {"kind": kind, "rows": 10, "size": 1024, "input_bytes": 2, "residual": residual}
    fits = fused_traffic(**sizes, fast_memory_bytes=2048)
    beyond = fused_traffic(**sizes, fast_memory_bytes=2047)
    assert beyond.bytes_read - fits.bytes_read == passes * 10 * 1024 * 2
    assert beyond.bytes_written == fits.bytes_written


def test_views_move_nothing_and_writing_in_place_does():
    x = torch.zeros(4, 8)
    assert traced_traffic(lambda: x.view(8, 4)[1:]).bytes_moved == 0
    tally = traced_traffic(lambda: x.add_(1.0))
    assert as_work(tally) == Work(0, x.nbytes, x.nbytes)


@pytest.mark.parametrize("traffic", [op_by_op_traffic, fused_traffic])
def test_what_is_refused(traffic):
    sizes = {"kind": "layer_norm", "rows": 2, "size": 2, "input_bytes": 2}
    for name, value, words in (
        ("kind", "batch_norm", "kind is 'batch_norm'; choose one of layer_norm, rms_norm"),
        ("rows", 0, "rows is 0; give a whole number from 1"),
        ("size", 1.5, "size is 1.5"),
        ("input_bytes", -2, "input_bytes is -2"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            traffic(**sizes | {name: value})
    with pytest.raises(InvalidArgumentError, match="fast_memory_bytes is 0"):
        fused_traffic(**sizes, fast_memory_bytes=0)
    with pytest.raises(InvalidArgumentError, match="kind is 'batch_norm'"):
        op_by_op_norm("batch_norm", torch.zeros(1, 1), torch.ones(1))
