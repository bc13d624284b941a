"""The chunked backend on every row of the conformance table, and the little it does besides."""

import pytest
import torch

from vllm_teach.attention.layout import Varlen
from vllm_teach.attention.memory_efficient import memory_efficient_attention
from vllm_teach.attention.patterns import LocalWindow
from vllm_teach.backends import conformance, memory_efficient
from vllm_teach.errors import InvalidArgumentError

GRADIENT_ROWS = [row for row in conformance.ROWS if row.has_gradients]


@pytest.mark.parametrize("row", conformance.ROWS, ids=lambda row: row.name)
def test_forward(row: conformance.Row) -> None:
    assert memory_efficient.supports(row.spec()) is None
    conformance.check_forward(memory_efficient.run, row)


@pytest.mark.parametrize("row", GRADIENT_ROWS, ids=lambda row: row.name)
def test_gradients(row: conformance.Row) -> None:
    assert memory_efficient.supports(row.spec(requires_grad=True)) is None
    conformance.check_gradients(memory_efficient.run, row)


def test_it_runs_everywhere() -> None:
    assert memory_efficient.name == "memory_efficient"
    assert memory_efficient.unavailable() is None


def test_it_is_xformers_interface_with_another_signature() -> None:
    q, k, v = (torch.randn(2, 30, 2, 8) for _ in range(3))
    out = memory_efficient.run(q, k, v, window_size=(4, 0), scale=0.2)
    assert torch.equal(out, memory_efficient_attention(q, k, v, LocalWindow(4, 0), scale=0.2))


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    with pytest.raises(InvalidArgumentError, match=r"q has shape \[5, 2, 8\]"):
        memory_efficient.run(q, k, v)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="cu_seqlens_q is"):
        memory_efficient.run(q, k, v, layout=Varlen(starts, starts))
