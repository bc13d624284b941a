import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.roofline import Point, attainable


@pytest.mark.parametrize(("intensity", "rate"), [(1, 50e9), (4, 200e9), (3.99, 199.5e9), (100, 200e9)])
def test_the_roof_is_the_lower_of_two_ceilings(intensity: float, rate: float) -> None:
    assert attainable(intensity, peak=200e9, bandwidth=50e9) == pytest.approx(rate)


def test_a_point_is_flops_per_byte_and_per_second() -> None:
    point = Point.of("naive", flops=8e9, nbytes=2e9, seconds=0.5, concept="naive")
    assert (point.intensity, point.flops_per_second) == (4.0, 16e9)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_what_is_not_positive_has_no_place(bad: float) -> None:
    with pytest.raises(InvalidArgumentError, match="intensity"):
        attainable(bad, 1, 1)
    with pytest.raises(InvalidArgumentError, match="peak"):
        attainable(1, bad, 1)
    with pytest.raises(InvalidArgumentError, match="seconds"):
        Point.of("naive", 1, 1, bad)
