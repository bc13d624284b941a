import matplotlib.pyplot as plt
import numpy as np
import pytest

from vllm_teach.teaching.figures.variance_error import (
    WAYS,
    draw_variance_error,
    from_the_first,
    sum_of_squares,
    two_passes,
    variance_error,
    welford,
)

ONE_PASS = "mean of squares − square of mean"


@pytest.mark.parametrize("way", WAYS.values())
def test_all_are_right_near_0_and_in_float32(way) -> None:
    row = np.array([2, 4, 4, 4, 5, 5, 7, 9], dtype=np.float32)
    assert way(row) == pytest.approx(4, rel=1e-6)
    assert way(row).dtype == np.float32


def test_one_pass_cancels_and_the_others_do_not() -> None:
    row = np.array([40000, 40001, 40002, 40003], dtype=np.float32)
    assert sum_of_squares(row) < 0
    assert [float(way(row)) for way in (welford, two_passes, from_the_first)] == [1.25] * 3


def test_errors_against_float64() -> None:
    data = variance_error([1.0, 1e3, 1e5])
    assert data.error[ONE_PASS][1] > 0.1
    assert data.error[ONE_PASS][2] > 100
    assert max(data.error["two passes, first number subtracted"]) < 1e-5
    assert max(data.error["Welford"]) < 1e-2
    assert all(not data.negative[way] for way in WAYS if way != ONE_PASS)
    assert data == variance_error([1.0, 1e3, 1e5]), "the same in every run"


def test_what_is_drawn() -> None:
    _, ax = plt.subplots()
    data = draw_variance_error(ax, variance_error([1.0, 1e4]))
    circles = [line for line in ax.lines if line.get_markersize() == 14]
    assert [tuple(line.get_xdata()) for line in circles] == [(d,) for d in data.negative[ONE_PASS]]
    labels = ax.get_legend_handles_labels()[1]
    assert set(WAYS) <= set(labels)
    assert ax.get_xscale() == ax.get_yscale() == "log"
