"""The conformance table in Triton's interpreter: every other float32 row, each float16 one, and some gradients.

The table lists rows of one kind beside each other, so each kind is met, as a test here checks. Every row, in bfloat16
and with gradients too, runs on a GPU: `python -m vllm_teach.validation.gpu`.
"""

from fnmatch import fnmatchcase

import pytest
import torch

from vllm_teach.backends import triton_backend
from vllm_teach.backends.conformance import ROWS, Row, check_forward, check_gradients
from vllm_teach.kernels.triton_kernels import tuning

# Rows by name, in the order in which they are looked through, and the reason; all others are supported.
REFUSED = {
    "*fp64": "not in torch.float64",
    "*bf16": "interpreter rounds torch.bfloat16 towards zero",
    "paged dropout*": "no dropout and no backward pass",
}
RUN = [row for row in ROWS if not any(fnmatchcase(row.name, names) for names in REFUSED)]
FORWARD = [row for index, row in enumerate(RUN) if index % 2 == 0 or row.dtype == torch.float16]
GRADIENTS = [row for row in RUN if row.has_gradients and row.pattern is None][::9]
by_name = {"ids": lambda row: row.name}


@pytest.fixture(autouse=True)
def tiles_by_length(request, monkeypatch):
    """An interpreted program takes milliseconds, however small its tile: long rows get large tiles."""
    row = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    longest = max(max(pair) for pair in row.lengths) if row else 0
    tile = tuning.Tile(64, 32) if longest <= 64 else tuning.Tile(128, 64) if longest <= 160 else tuning.Tile(256, 128)
    monkeypatch.setattr(tuning, "_IN_THE_INTERPRETER", tile)


@pytest.mark.parametrize("row", FORWARD, **by_name)
def test_forward(row: Row) -> None:
    check_forward(triton_backend.run, row)


@pytest.mark.parametrize("row", GRADIENTS, **by_name)
def test_gradients(row: Row) -> None:
    check_gradients(triton_backend.run, row)


def test_every_kind_of_row_is_among_those_that_run() -> None:
    def kinds(rows: list[Row]) -> set[tuple[object, ...]]:
        return {(row.name.split()[0].rstrip(","), row.layout, row.dtype) for row in rows if row.layout}

    def options(rows: list[Row]) -> set[str]:
        words = ("causal", "full", "head_dim", "heads", "window", "pattern", "softcap", "alibi", "scale", "dropout")
        return {word for row in rows for word in words if word in row.name}

    assert kinds(FORWARD) == kinds(RUN)
    assert options(FORWARD) == options(RUN)


def test_it_supports_exactly_the_rows_that_are_not_on_the_list() -> None:
    for row in ROWS:
        expected = next((reason for names, reason in REFUSED.items() if fnmatchcase(row.name, names)), None)
        reason = triton_backend.supports(row.spec())
        assert (reason is None) == (expected is None), f"{row.name}: {reason}"
        assert reason is None or expected in reason, f"{row.name}: {reason}"


def test_a_row_that_is_refused_raises_the_reason() -> None:
    row = next(row for row in ROWS if row.name.startswith("paged dropout"))
    inputs = row.inputs()
    with pytest.raises(ValueError, match="no dropout and no backward pass"):
        triton_backend.run(*inputs[:3], layout=inputs.layout, **inputs.arguments)


def test_it_runs_here() -> None:
    assert triton_backend.unavailable() is None
