import math

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.growth import log_log_slope


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_a_pure_power_is_found(power: float) -> None:
    sizes = [3, 10, 64, 1000]
    assert log_log_slope(sizes, [7 * n**power for n in sizes]) == pytest.approx(power, abs=1e-12)


def test_between_two_points_it_is_a_ratio_of_logarithms() -> None:
    assert log_log_slope([1000, 3000], [20, 50]) == pytest.approx(math.log(2.5) / math.log(3))


def test_of_more_points_it_is_the_least_squares_line() -> None:
    # In powers of two: (0, 0), (1, 3), (2, 0) lie level on average.
    assert log_log_slope([1, 2, 4], [1, 8, 1]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("sizes", "costs", "named"),
    [
        ([2], [3], "two different sizes"),
        ([2, 2], [3, 4], "two different sizes"),
        ([2, 4], [3], "one cost per size"),
        ([2, 4], [3, 0], "above 0"),
        ([2, 4], [3, math.nan], "above 0"),
    ],
)
def test_what_has_no_slope(sizes: list[float], costs: list[float], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        log_log_slope(sizes, costs)
