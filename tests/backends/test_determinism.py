"""The same input gives the same bits, forward and backward, with a fixed number of threads."""

import pytest
import torch

from vllm_teach import backends
from vllm_teach.backends.conformance import ROWS, Row

NAMES = ("causal 129x257 bf16", "window (64, 0) fp16", "varlen causal fp32", "paged decode, blocks of 16 fp32")
CHOSEN = [row for row in ROWS if row.name in NAMES]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
@pytest.mark.parametrize("name", backends.names())
def test_forward(name: str, row: Row, uncompiled_flex: None) -> None:
    backend = backends.get(name)
    if backend.unavailable() is not None or backend.supports(row.spec()) is not None:
        return  # test_conformance says which these are
    torch.set_num_threads(2)  # the fixture of this folder sets it back
    inputs = row.inputs()
    outs = [backend.run(*inputs[:3], layout=inputs.layout, **inputs.arguments) for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("row", [row for row in CHOSEN if row.has_gradients], ids=lambda row: row.name)
@pytest.mark.parametrize("name", backends.names())
def test_backward(name: str, row: Row) -> None:
    backend = backends.get(name)
    if backend.unavailable() is not None or backend.supports(row.spec(requires_grad=True)) is not None:
        return
    torch.set_num_threads(2)
    runs = []
    for _ in range(3):
        inputs = row.inputs()
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        out = backend.run(*leaves, layout=inputs.layout, **inputs.arguments)
        runs.append(torch.autograd.grad(out.float().square().sum(), leaves))
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def test_the_rows_are_there() -> None:
    assert len(CHOSEN) == len(NAMES)
