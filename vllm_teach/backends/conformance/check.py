"""FlashAttention's rule: at most so many times the error of the plain formula in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_teach.backends.conformance.packing import PACKERS, Sequence
from vllm_teach.backends.conformance.row import Row
from vllm_teach.backends.conformance.truth import references

Run = Callable[..., torch.Tensor]  # as `spec.Backend.run`


def check_forward(run: Run, row: Row, device: torch.device | str = "cpu") -> None:
    """Call `run` with the row's inputs; raise AssertionError, with row, error and limit, when its output is off."""
    inputs = row.inputs(device)
    before = [tensor.clone() for tensor in inputs[:3]]
    with torch.no_grad():
        out = run(*inputs[:3], layout=inputs.layout, **inputs.arguments)
    for name, old, new in zip("qkv", before, inputs[:3], strict=True):
        assert torch.equal(old.nan_to_num(7.5), new.nan_to_num(7.5)), f"{row.name}: {name} was changed."
    exact, plain = references(row)
    _compare(row, "out", _unpacked(out, row), exact.outs, _limit(row, exact.outs, plain.outs, factor=2), inputs.q, out)


def check_gradients(run: Run, row: Row, device: torch.device | str = "cpu") -> None:
    """As `check_forward`, for the gradients of q, k and v under a random gradient of the output."""
    inputs = row.inputs(device)
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    out = run(*leaves, layout=inputs.layout, **inputs.arguments)
    upstream = PACKERS[row.layout]([Sequence(g, g, g) for g in row.upstream()], row.block_size).q.to(device)
    grads = torch.autograd.grad(out, leaves, upstream)
    exact, plain = references(row)
    for name, leaf, grad, index in zip("qkv", leaves, grads, range(3), strict=True):
        true, rough = ([one[index] for one in reference.grads] for reference in (exact, plain))
        largest = max((float(g.abs().max()) for g in true if g.numel()), default=0.0)
        limit = _limit(row, true, rough, factor=3) + 1e-4 * largest * (row.dtype != torch.float64)
        _compare(row, f"gradient of {name}", _unpacked(grad, row, keys=name != "q"), true, limit, leaf, grad)


def _limit(row: Row, exact: list[torch.Tensor], plain: list[torch.Tensor], factor: int) -> float:
    if row.dtype == torch.float64:
        return 1e-10
    errors = [float((a - b.double()).abs().max()) for a, b in zip(exact, plain, strict=True) if a.numel()]
    return factor * max(errors, default=0.0) + 1e-5


def _compare(
    row: Row,
    what: str,
    got: list[torch.Tensor],
    exact: list[torch.Tensor],
    limit: float,
    like: torch.Tensor,
    whole: torch.Tensor,
) -> None:
    want = (like.shape, like.dtype, like.device)
    have = (whole.shape, whole.dtype, whole.device)
    assert want == have, f"{row.name}: {what} has shape, dtype and device {have}; they must be {want}."
    for index, (a, b) in enumerate(zip(got, exact, strict=True)):
        error = (a.detach().double().cpu() - b).abs()
        bad = torch.nonzero(~(error <= limit)).tolist()  # also where the error is NaN
        shown = [f"{at}: {a[tuple(at)].item():.6g}, exactly {b[tuple(at)].item():.6g}" for at in bad[:3]]
        assert not bad, (
            f"{row.name}: {what} of sequence {index} is off by {error.max().item():.3g}, more than {limit:.3g}, "
            f"in {len(bad)} of {error.numel()} elements; {'; '.join(shown)}."
        )


def _unpacked(tensor: torch.Tensor, row: Row, keys: bool = False) -> list[torch.Tensor]:
    """Return the parts of a dense or flat tensor that belong to each sequence, by its queries or its keys."""
    if row.layout == "dense":
        return list(tensor)
    return list(tensor.split([lengths[keys] for lengths in row.lengths]))
