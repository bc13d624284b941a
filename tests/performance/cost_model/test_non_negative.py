"""The solution against the conditions that only the best one meets (Karush, Kuhn and Tucker)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.non_negative import non_negative_least_squares


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_nothing_is_gained_by_moving_any_coefficient(seed: int, terms: int, more: int) -> None:
    source = np.random.default_rng(seed)
    columns, target = source.normal(size=(terms + more, terms)), source.normal(size=terms + more)
    x = non_negative_least_squares(columns, target)
    slope = columns.T @ (columns @ x - target)  # of half the squared error
    assert (x >= 0).all()
    assert (slope >= -1e-8).all(), "more of some term would lower the error"
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-8, "less of some term would lower the error"


def test_exact_coefficients_of_very_different_sizes_come_back() -> None:
    source = np.random.default_rng(1)
    columns = source.random((20, 4)) * np.array([1.0, 1e12, 1e9, 1e3])
    costs = np.array([1e-3, 2e-12, 0.0, 5e-6])
    assert non_negative_least_squares(columns, columns @ costs) == pytest.approx(costs, rel=1e-9, abs=1e-20)


def test_a_term_that_never_occurs_costs_nothing() -> None:
    columns = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert non_negative_least_squares(columns, np.array([3.0, 6.0])) == pytest.approx([3.0, 0.0])


@pytest.mark.parametrize(("rows", "terms", "targets"), [(5, 11, 5), (5, 2, 4)])
def test_shapes_that_do_not_fit_are_refused(rows: int, terms: int, targets: int) -> None:
    with pytest.raises(InvalidArgumentError, match="columns has shape"):
        non_negative_least_squares(np.ones((rows, terms)), np.ones(targets))
