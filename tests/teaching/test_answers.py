"""A wrong answer is never called right, and the line that says why names the first place that differs."""

import math

import numpy as np
import pytest
import torch

from vllm_teach.teaching.answers import Judged, difference, same

TIGHT = {"rtol": 1e-9, "atol": 1e-12}
EXPECTED = torch.tensor([[1.0, 2.0], [-math.inf, 4.0]], dtype=torch.float64)


def changed(value: float) -> torch.Tensor:
    other = EXPECTED.clone()
    other[1, 1] = value
    return other


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (EXPECTED, EXPECTED.clone()),
        (EXPECTED, EXPECTED.clone().requires_grad_()),
        (torch.tensor([True, False]), torch.tensor([True, False])),
        ((EXPECTED, 3), [EXPECTED.clone(), 3]),
        (3, 3.0),
        (3, torch.tensor(3)),
        (3, np.int64(3)),
        (0.5, np.float64(0.5)),
        (0.1 + 0.2, 0.3),
    ],
)
def test_right_answers(expected, got):
    assert difference(expected, got, **TIGHT) is None


@pytest.mark.parametrize(
    ("expected", "got", "text"),
    [
        (EXPECTED, changed(5.0), "first difference at [1, 1]: expected 4.0, got 5.0 (1 of 4 elements differ)"),
        (EXPECTED, changed(math.nan), "got nan"),
        (EXPECTED, changed(4.0 + 1e-6), "first difference at [1, 1]"),
        (EXPECTED, EXPECTED.nan_to_num(neginf=math.nan), "first difference at [1, 0]: expected -inf, got nan"),
        (EXPECTED, EXPECTED.float(), "expected dtype float64, got float32"),
        (EXPECTED, EXPECTED[:1], "expected shape [2, 2], got [1, 2]"),
        (EXPECTED, EXPECTED.tolist(), "expected a tensor of shape [2, 2], got a list"),
        (EXPECTED, EXPECTED.numpy(), "got a ndarray"),
        (torch.tensor([True]), torch.tensor([1]), "expected dtype bool, got int64"),
        ((1, 2), (1, 3), "value 2 of 2: expected 2, got 3"),
        (0.123456789, 0.123456712, "expected 0.123456789, got 0.123456712"),
        ((1, 2), (1,), "expected a tuple of 2 values, got 1"),
        ((1, 2), 1, "expected a tuple of 2 values, got an int"),
        (3, 3.0000001, "expected 3"),
        (3, True, "expected a number, got a bool"),
        (1, torch.tensor(True), "expected a number, got a bool"),
        (3, torch.tensor([3]), "expected a number, got a tensor of shape [1]"),
        (3, "3", "expected a number, got a str"),
        (0.5, math.nan, "expected 0.5, got nan"),
    ],
)
def test_wrong_answers_and_why(expected, got, text):
    assert text in difference(expected, got, **TIGHT)


def test_same_is_exact_and_knows_nan():
    nan = torch.tensor([math.nan, 1.0])
    assert same((nan, 3), (nan.clone(), 3))
    assert not same(nan, torch.tensor([math.nan, 1.0 + 1e-7]))
    assert not same(nan, nan.double())
    assert not same(nan, torch.tensor([math.nan]))
    assert not same([1, 2], [1])
    assert not same([1, 2], (1, 2))


def test_a_judged_answer_is_asked_about_and_not_compared() -> None:
    even = Judged(lambda got: None if got % 2 == 0 else f"{got} is odd")
    assert difference(even, 4, **TIGHT) is None
    assert difference(even, 6, **TIGHT) is None
    assert difference((even, 1), (3, 1), **TIGHT) == "value 1 of 2: 3 is odd"
