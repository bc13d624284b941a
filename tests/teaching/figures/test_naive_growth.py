import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.naive_growth import draw_growth, square_fit

SIZES = (128, 256, 512, 1024, 2048, 4096)


def test_a_square_law_has_slope_two_and_its_own_factor() -> None:
    slope, factor = square_fit({n: 3e-9 * n**2 for n in SIZES})
    assert slope == pytest.approx(2)
    assert factor == pytest.approx(3e-9)


def test_small_sizes_do_not_bend_the_slope() -> None:
    costs = {n: 5.0 * n**2 for n in SIZES}
    slope, _ = square_fit(costs | {128: 1e9, 256: 1e9, 512: 1e9})
    assert slope == pytest.approx(2)


def test_a_steeper_law_is_seen() -> None:
    assert square_fit({n: float(n) ** 3 for n in SIZES})[0] == pytest.approx(3)


def test_three_sizes_are_too_few() -> None:
    with pytest.raises(InvalidArgumentError, match="four"):
        square_fit({1: 1.0, 2: 4.0, 4: 16.0})


def test_the_figure_holds_the_measurements_and_the_baseline() -> None:
    seconds, peak = {n: 1e-9 * n**2 for n in SIZES}, {n: 13 * n**2 for n in SIZES}
    figure, data = draw_growth(seconds, peak)
    assert data.seconds_slope == pytest.approx(2)
    assert data.bytes_factor == pytest.approx(13)
    for ax, costs in zip(figure.axes, (seconds, peak), strict=True):
        baseline, measured = ax.lines
        assert list(measured.get_ydata()) == list(costs.values())
        assert list(baseline.get_ydata()) == pytest.approx(list(costs.values()))
        assert ax.get_xscale() == ax.get_yscale() == "log"
    plt.close(figure)
