"""Lesson 10's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest
import torch

from vllm_teach.teaching import check
from vllm_teach.teaching.checks.custom_kernels import FAULTS, IllegalAddressError, kernel_with, loader


def both_bytes(rows, size, element):
    tensor, parameters = rows * size * element, 2 * size * element
    return 5 * tensor + parameters, 4 * tensor + parameters


def merge(left, right):
    (a, mean_a, m2_a), (b, mean_b, m2_b) = left, right
    if not a or not b:
        return left if a else right
    delta = mean_b - mean_a
    return a + b, mean_a + delta * b / (a + b), m2_a + m2_b + delta**2 * a * b / (a + b)


def merge_from_the_right(left, right):
    """Right: the other way round."""
    return merge(right, left)


def merge_by_squares(left, right):
    """Adds up x and x^2: right on paper."""
    n = left[0] + right[0]
    if not n:
        return 0, 0.0, 0.0
    total = sum(count * mean for count, mean, _ in (left, right))
    squares = sum(m2 + count * mean**2 for count, mean, m2 in (left, right))
    return n, total / n, squares - total**2 / n


def moments(load, row, stride, size, tile, *, mask=True, other=0.0, again=True, start=None, by=None):
    lanes = torch.arange(tile)
    there = lanes < size
    x = load((row * stride if start is None else start) + lanes, there if mask else None, other)
    mean = x.sum() / (by or size)
    centred = torch.where(there, x - mean, 0.0) if again else x - mean
    return mean.item(), (centred.square().sum() / (by or size)).item()


def moments_of_the_slice(load, row, stride, size, tile):
    """Right: loads no lane beyond the row at all."""
    x = load(row * stride + torch.arange(size))
    return x.mean().item(), x.var(correction=0).item()


def find(normalise, rows=([0.001, 0.003], [1.0, 2.0, 6.0], [4096.0, 4097.0])):
    tiny = normalise(rows[0])[1].item()
    if tiny > 0.9:
        return "no eps"
    if tiny < 0.295:
        return "n - 1"
    if normalise(rows[1])[2].item() < 1.38:
        return "unmasked padding"
    return "one pass" if normalise(rows[2])[1].item() > 2 else "none"


def find_in_one_run(normalise):
    """Right: one row has it all: three numbers, far from 0, that hardly vary; compare with what each fault gives."""
    row = [4096.0, 4096.0, 4096.001953125]
    found = normalise(row)
    answers = {fault: kernel_with(fault)(row) for fault in FAULTS}
    return min(answers, key=lambda fault: (answers[fault].nan_to_num(1e9) - found.nan_to_num(1e9)).abs().sum().item())


def find_by_drawn_rows(normalise):
    """Looks at an ordinary row alone."""
    torch.manual_seed(0)
    out = normalise(torch.randn(1024).tolist())
    return "none" if abs(out.square().mean().item() - 1) < 1e-4 else "n - 1"


def never(answer, instead="none"):
    """An answer that misses one of the faults."""

    def find_all_but(normalise):
        found = find(normalise)
        return instead if found == answer else found

    return find_all_but


RIGHT = {
    "residual_norm_bytes": [both_bytes, lambda r, s, e: tuple((n * r + 2) * s * e for n in (5, 4))],
    "merge_moments": [merge, merge_from_the_right, lambda a, b: list(merge(a, b))],
    "row_moments": [moments, moments_of_the_slice, lambda *a: moments(*a, other=0)],
    "find_the_fault": [find, find_in_one_run],
}
WRONG = {
    "residual_norm_bytes": {
        "swapped": lambda r, s, e: both_bytes(r, s, e)[::-1],
        "elements": lambda r, s, e: both_bytes(r, s, 1),
        "float32": lambda r, s, e: both_bytes(r, s, 4),
        "the sum is not written": lambda r, s, e: (both_bytes(r, s, e)[0], (3 * r + 2) * s * e),
        "the sum is read back": lambda r, s, e: (both_bytes(r, s, e)[0], (5 * r + 2) * s * e),
        "without parameters": lambda r, s, e: (5 * r * s * e, 4 * r * s * e),
        "no bias": lambda r, s, e: ((5 * r + 1) * s * e, (4 * r + 1) * s * e),
        "parameters for each row": lambda r, s, e: (7 * r * s * e, 6 * r * s * e),
        "parameters in both kernels": lambda r, s, e: ((5 * r + 4) * s * e, (4 * r + 2) * s * e),
        "addition in place": lambda r, s, e: ((4 * r + 2) * s * e, (4 * r + 2) * s * e),
        "the ratio": lambda r, s, e: both_bytes(r, s, e)[0] / both_bytes(r, s, e)[1],
        "one pass over x, residual and result": lambda r, s, e: ((5 * r + 2) * s * e, (3 * r + 2) * s * e),
    },
    "merge_moments": {
        "m2 added up": lambda a, b: (*merge(a, b)[:2], a[2] + b[2]),
        "mean of means": lambda a, b: (a[0] + b[0], (a[1] + b[1]) / 2, merge(a, b)[2]),
        "sums of squares": merge_by_squares,
        "the variance": lambda a, b: (*merge(a, b)[:2], merge(a, b)[2] / max(1, a[0] + b[0])),
        "delta times n": lambda a, b: (*merge(a, b)[:2], a[2] + b[2] + (a[1] - b[1]) ** 2 * a[0] * b[0]),
        "delta not squared": lambda a, b: (
            *merge(a, b)[:2],
            a[2] + b[2] + abs(a[1] - b[1]) * a[0] * b[0] / max(1, a[0] + b[0]),
        ),
        "weights swapped": lambda a, b: (
            a[0] + b[0],
            a[1] + (b[1] - a[1]) * a[0] / max(1, a[0] + b[0]),
            merge(a, b)[2],
        ),
        "empty parts divide by 0": lambda a, b: (
            a[0] + b[0],
            (a[0] * a[1] + b[0] * b[1]) / (a[0] + b[0]),
            merge(a, b)[2],
        ),
        "left alone": lambda a, b: a,
        "right alone": lambda a, b: b,
        "larger part": lambda a, b: max(a, b),
        "counts alone": lambda a, b: a[0] + b[0],
        "half of the difference": lambda a, b: (*merge(a, b)[:2], (merge(a, b)[2] + a[2] + b[2]) / 2),
        "nothing has NaN as mean": lambda a, b: merge(a, b) if a[0] + b[0] else (0, math.nan, 0.0),
    },
    "row_moments": {
        "no mask": lambda *a: moments(*a, mask=False),
        "masked, but no other": lambda *a: moments(*a, other=None),
        "other is 1": lambda *a: moments(*a, other=1.0),
        "no second mask": lambda *a: moments(*a, again=False),
        "divided by the tile": lambda *a: moments(*a, by=a[4]),
        "row * size": lambda *a: moments(*a, start=a[1] * a[3]),
        "row * tile": lambda *a: moments(*a, start=a[1] * a[4]),
        "the first row": lambda *a: moments(*a, start=0),
        "swapped": lambda *a: moments(*a)[::-1],
        "deviation": lambda *a: (moments(*a)[0], moments(*a)[1] ** 0.5),
        "sum of squares": lambda *a: (moments(*a)[0], moments(*a)[1] * a[3]),
        "n - 1": lambda *a: (moments(*a)[0], moments(*a)[1] * a[3] / max(1, a[3] - 1)),
        "mean of squares": lambda *a: (moments(*a)[0], moments(*a)[1] + moments(*a)[0] ** 2),
        "the mean alone": lambda *a: moments(*a)[0],
        "one lane less": lambda *a: moments(a[0], a[1], a[2], max(1, a[3] - 1), a[4]),
        "the stride as size": lambda *a: moments(a[0], a[1], a[2], min(a[2], a[4]), a[4]),
    },
    "find_the_fault": {
        "an ordinary row": find_by_drawn_rows,
        "rows around 0": lambda f: find(f, ([0.001, 0.003], [-1.0, -2.0, 3.0], [4096.0, 4097.0])),
        "powers of two": lambda f: find(f, ([0.001, 0.003], [1.0, 2.0, 6.0, 7.0], [4096.0, 4097.0])),
        "nothing far from 0": lambda f: find(f, ([0.001, 0.003], [1.0, 2.0, 6.0], [1.0, 2.0])),
        "a large variance": lambda f: find(f, ([1.0, 3.0], [1.0, 2.0, 6.0], [4096.0, 4097.0])),
        "a run to be sure": lambda f: (f([1.0]), find(f))[1],
        "its number": lambda f: FAULTS.index(find(f)),
        "the first letter": lambda f: find(f)[:1],
        "a list": lambda f: [find(f)],
        **{f"always {fault}": lambda f, fault=fault: fault for fault in FAULTS},
        **{f"never {fault}": never(fault) for fault in FAULTS[1:]},
        "never none": never("none", "one pass"),
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(name, a, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, a in wrong.items()],
)
def test_wrong(name, answer):
    assert getattr(check, name)(answer).status in ("wrong", "error")


def test_the_hidden_fault_is_not_told():
    result = check.find_the_fault(lambda normalise: "no eps")
    assert "this kernel's fault is not 'no eps'" in result.message
    assert "expected one of 'none', 'one pass'" in check.find_the_fault(lambda normalise: "other").message


def test_a_kernel_without_fault_is_layer_norm_and_each_fault_shows_somewhere():
    rows = ([0.001, 0.003], [1.0, 2.0, 6.0], [4096.0, 4097.0])
    for row in rows:
        x = torch.tensor(row)
        exact = torch.nn.functional.layer_norm(x, x.shape)
        assert torch.allclose(kernel_with("none")(row), exact, atol=1e-3)
    seen = {tuple(tuple(kernel_with(fault)(row).tolist()) for row in rows) for fault in FAULTS}
    assert len(seen) == len(FAULTS)


def test_a_fourth_run_is_refused():
    normalise = kernel_with("none")
    for _ in range(3):
        normalise([1.0, 2.0])
    with pytest.raises(Exception, match="3 runs are allowed"):
        normalise([1.0, 2.0])


def test_a_load_behaves_as_tritons():
    load = loader(torch.arange(4).double())
    assert load(torch.tensor([0, 3])).tolist() == [0, 3]
    assert load(torch.tensor([1, 9]), torch.tensor([True, False]), -1.0).tolist() == [1, -1]
    assert load(torch.tensor([9]), torch.tensor([False])).isnan().all()
    with pytest.raises(IllegalAddressError, match="element 4"):
        load(torch.tensor([0, 4]))


def test_what_the_learner_gets_has_nothing_to_read():
    for case in (*check.find_the_fault.cases(), *check.row_moments.cases()):
        assert vars(case.fresh_arguments()[0]) == {}
