import math

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.finding import MEASURED, Finding, arithmetic, counted, measured, number


def test_a_measurement_has_the_median_and_the_spread_of_its_samples() -> None:
    found = measured("seconds", Timing.of([3.0, 1.0, 2.0, 5.0, 4.0]), "ms", "here", scale=1e3)
    assert (found.value, found.low, found.high, found.samples) == (3000.0, 1000.0, 5000.0, 5)
    assert found.text == "3,000 ms (1,000 to 5,000)"


def test_a_negative_scale_turns_the_ends_around() -> None:
    found = measured("change", Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]), "", "here", scale=-1.0)
    assert (found.low, found.value, found.high) == (-5.0, -3.0, -1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_is_refused(value: float) -> None:
    with pytest.raises(InvalidArgumentError, match="not finite"):
        counted("bytes", value, "MB", "here")


def test_another_way_to_come_by_a_number_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="how='guessed'"):
        Finding("x", 1.0, "", "guessed", "here", 1.0, 1.0)


def test_a_value_outside_its_spread_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"outside 2\.0 to 3\.0"):
        Finding("x", 1.0, "", "counted here", "here", 2.0, 3.0)


def test_a_clock_needs_five_samples() -> None:
    with pytest.raises(InvalidArgumentError, match="samples=4"):
        Finding("x", 1.0, "", MEASURED, "here", 1.0, 1.0, 4)


def test_what_was_not_measured_prints_no_spread() -> None:
    assert arithmetic("weights", 137.953, "GB", "69e9 · 2").text == "138 GB"


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (2.0, "2"), (0.2345, "0.234"), (23.81, "23.8"), (185.4, "185"), (75928.0, "75,928")]
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float, shown: str) -> None:
    assert number(value) == shown
