"""Which rows of the conformance table each backend supports, by a list; and that it passes what it supports.

`memory_efficient`, `cpu` and `triton` run their rows in test files of their own.
"""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from vllm_teach import backends
from vllm_teach.backends.conformance import ROWS, Row, check_forward, check_gradients
from vllm_teach.backends.conformance.truth import formula

# Rows by name, in the order in which they are looked through, and the reason; all others are supported.
REFUSED = {
    "naive": {},
    "tiled": {},
    "memory_efficient": {},
    "sdpa": {"*softcap*": "no softcap", "*dropout*": "dropout mask"},
    "flex": {"*fp64": "not in torch.float64", "*dropout*": "no dropout"},
    "cpu": {"*fp64": "torch.float64", "*dropout*": "dropout"},
    "triton": {"*fp64": "not in torch.float64", "paged dropout*": "no dropout"},
    "flash_attn": {
        "*fp32": "not in torch.float32",
        "*fp64": "not in torch.float64",
        "*pattern*": "is neither",
        "*dropout*": "dropout mask",
        "*blocks of 16*": "multiple of 256, not 16",
    },
    "xformers": {
        "*fp64": "not in torch.float64",
        "*pattern*": "is neither",
        "*window (8, 8)*": "no mask for a window of 8 keys to the left and 8 to the right",
        "*window (0, 5)*": "no mask for a window",
        "*window (-1, 3)*": "no mask for a window",
        "*window (5, -1)*": "no mask for a window",
        "*window (16, 9) 150x40*": "no mask for a window",
        "*window (6, 2) full*": "no mask for a window",
        "*softcap*": "no softcap",
        "*alibi*": "ALiBi",
        "*dropout*": "dropout mask",
        "paged*": "paged caches",
    },
}
DEVICE = {"triton": "cuda", "flash_attn": "cuda", "xformers": "cuda"}
# The same for gradients, of rows whose forward pass is supported.
NO_BACKWARD = {
    "flex": {"*": "no backward pass on CPUs"},
    "cpu": {"*": "backward pass"},
    "triton": {"*pattern*": "no backward pass"},
}
RUN_HERE = ("naive", "tiled", "sdpa")
by_name = {"ids": lambda row: row.name}


def expected_refusal(name: str, row: Row, table: dict[str, dict[str, str]] = REFUSED) -> str | None:
    return next((reason for rows, reason in table.get(name, {}).items() if fnmatchcase(row.name, rows)), None)


@pytest.mark.parametrize("name", REFUSED)
def test_it_supports_exactly_the_rows_on_the_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend = backends.get(name)
    for row in ROWS:
        spec = replace(row.spec(), device=DEVICE.get(name, "cpu"))
        reason, expected = backend.supports(spec), expected_refusal(name, row)
        assert (reason is None) == (expected is None), f"{row.name}: {reason}"
        assert reason is None or (expected in reason and reason.endswith(".")), f"{row.name}: {reason}"
        if row.has_gradients and reason is None:
            refusal, expected = (
                backend.supports(replace(spec, requires_grad=True)),
                expected_refusal(name, row, NO_BACKWARD),
            )
            assert (refusal is None) == (expected is None), f"{row.name}: {refusal}"
            assert refusal is None or expected in refusal, f"{row.name}: {refusal}"


def test_every_pattern_of_the_list_matches_a_row() -> None:
    for name, rows in [*REFUSED.items(), *NO_BACKWARD.items()]:
        for pattern in rows:
            assert any(fnmatchcase(row.name, pattern) for row in ROWS), f"{name}: {pattern}"


def test_the_list_covers_every_backend() -> None:
    assert list(REFUSED) == backends.names()


@pytest.mark.parametrize("row", ROWS, **by_name)
@pytest.mark.parametrize("name", RUN_HERE)
def test_forward(name: str, row: Row) -> None:
    if expected_refusal(name, row) is None:
        check_forward(backends.get(name).run, row)
    else:
        assert_refused(name, row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_gradients], **by_name)
@pytest.mark.parametrize("name", RUN_HERE)
def test_gradients(name: str, row: Row) -> None:
    if expected_refusal(name, row) is None:
        check_gradients(backends.get(name).run, row)
    else:
        assert_refused(name, row)


def assert_refused(name: str, row: Row) -> None:
    inputs = row.inputs()
    with pytest.raises(ValueError, match=r"\.$") as caught:
        backends.get(name).run(*inputs[:3], layout=inputs.layout, **inputs.arguments)
    assert str(caught.value) == backends.get(name).supports(row.spec())


def test_the_table_asks_what_it_should() -> None:
    """Each of the things that have gone wrong in some kernel, so that no row is lost unnoticed."""
    assert 60 <= len(ROWS) == len({row.name for row in ROWS})
    assert {row.dtype for row in ROWS} == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    assert {32, 64, 128, 256} <= {row.head_dim for row in ROWS}
    lengths = [pair for row in ROWS for pair in row.lengths]
    assert {1, 1111} <= {length for pair in lengths for length in pair}
    assert any(q > kv > 0 for q, kv in lengths)
    assert any(0 < q < kv for q, kv in lengths)
    assert {(3, 0), (0, 3), (0, 0)} <= set(lengths)
    assert {row.block_size for row in ROWS if row.layout == "paged"} >= {1, 16, 256}
    assert any(row.heads[1] == 1 < row.heads[0] for row in ROWS)
    for feature in ("pattern", "softcap", "dropout_p", "scale"):
        assert any(getattr(row, feature) for row in ROWS), feature


def broken(change: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*tensors: torch.Tensor, **arguments: object) -> torch.Tensor:
        return change(backends.get("naive").run(*tensors, **arguments), *tensors)

    return run


ROW = next(row for row in ROWS if row.name == "causal 40x150 fp32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out, *_: out * (1 + 1e-4), "out of sequence 0 is off by .*, more than .*: .*, exactly "),
        (lambda out, *_: out.double(), "out has shape, dtype and device"),
        (lambda out, *_: out[:, :-1], "out has shape, dtype and device"),
        (lambda out, *_: out.index_fill(1, torch.tensor([3]), torch.nan), "out of sequence 0 is off by nan"),
        (lambda out, q, *_: (out, q.mul_(1.5))[0], "q was changed"),
    ],
)
def test_a_wrong_answer_is_reported(change: Callable[..., torch.Tensor], words: str) -> None:
    check_forward(broken(lambda out, *_: out), ROW)
    with pytest.raises(AssertionError, match=f"^causal 40x150 fp32: {words}"):
        check_forward(broken(change), ROW)


def test_a_wrong_gradient_is_reported() -> None:
    def straight(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return out + (k.sum() - k.sum().detach()) * 1e-3  # right forward, wrong backward

    check_forward(broken(straight), ROW)
    with pytest.raises(AssertionError, match=r"^causal 40x150 fp32: gradient of k of sequence 0 is off"):
        check_gradients(broken(straight), ROW)


def test_the_truth_is_pytorchs_formula() -> None:
    row = next(row for row in ROWS if row.name == "full 65x129 fp32")
    for index, one in enumerate(row.sequences()):
        q, k, v = (part.double().transpose(0, 1) for part in one)  # [heads, length, head_dim]
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1)
        ours = formula(one._replace(q=one.q.double(), k=one.k.double(), v=one.v.double()), index, **row.arguments())
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
