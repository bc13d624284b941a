"""Percentiles in bounded memory, against sorted lists."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.log_histogram import ACCURACY, LogHistogram
from vllm_teach.performance.virtual_time import quantile

seconds = st.one_of(st.just(0.0), st.floats(1e-7, 1e5))


def filled(values: list[float]) -> LogHistogram:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(seconds, min_size=1, max_size=60), st.integers(0, 100))
def test_every_percentile_is_within_the_accuracy_of_the_exact_one(values: list[float], percent: int) -> None:
    exact = sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]  # nearest rank, in whole numbers
    assert filled(values).quantile(percent / 100) == pytest.approx(exact, rel=ACCURACY * 1.001, abs=1e-7)


def test_the_simulator_means_the_same_by_a_quantile() -> None:
    source = random.Random(0)
    values = [source.lognormvariate(-3, 1.5) for _ in range(10_000)]
    for share in (0, 0.5, 0.9, 0.95, 0.99, 0.999, 1):
        assert filled(values).quantile(share) == pytest.approx(quantile(values, share), rel=ACCURACY)


def test_count_mean_and_extremes_are_exact() -> None:
    histogram = filled([0.25, 4.0, 0.5])
    histogram.add(1.0, times=5)
    assert (histogram.count, histogram.mean, histogram.low, histogram.high) == (8, 9.75 / 8, 0.25, 4.0)
    assert histogram.quantile(1) == 4.0


def test_rank_of_7_percent_of_100_is_7() -> None:
    """0.07 * 100 is 7.000000000000001: whose ceiling is 8."""
    assert filled([float(i) for i in range(1, 101)]).quantile(0.07) == pytest.approx(7, rel=ACCURACY)


def test_a_million_values_take_no_more_buckets_than_their_range_has() -> None:
    histogram = LogHistogram()
    source = random.Random(1)
    for _ in range(50_000):
        histogram.add(10 ** source.uniform(-6, 2), times=20)
    assert histogram.count == 1_000_000
    assert len(histogram._buckets) <= math.log(1e8) / (2 * ACCURACY) + 2


def test_nothing_has_no_percentiles_and_nonsense_is_refused() -> None:
    empty = LogHistogram()
    assert empty.summary() is None
    for bad in (-1e-9, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match="cannot be counted"):
            empty.add(bad)
    with pytest.raises(InvalidArgumentError, match="of 0 values"):
        empty.quantile(0.5)
    with pytest.raises(InvalidArgumentError, match=r"share=1\.5"):
        filled([1.0]).quantile(1.5)
    with pytest.raises(InvalidArgumentError, match="no mean"):
        _ = empty.mean


def test_the_summary_names_its_percentiles() -> None:
    assert list(filled([1.0]).summary() or {}) == ["count", "mean", "p50", "p90", "p95", "p99", "max"]
