"""Each check passes what it should and names the field, its value and the way out otherwise."""

import math

import numpy as np
import pytest

from vllm_teach.engine.field_checks import check_choice, check_flag, check_number, check_whole, is_whole, is_within
from vllm_teach.errors import InvalidArgumentError


@pytest.mark.parametrize("value", [0, -3, np.int8(5), 10**400])
def test_whole_numbers(value: object) -> None:
    assert is_whole(value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, math.nan])
def test_what_is_no_whole_number(value: object) -> None:
    assert not is_whole(value)
    with pytest.raises(InvalidArgumentError, match=r"^size=.* is not valid: use a whole number from 0\.$"):
        check_whole("size", value, 0)


def test_bounds_are_included_unless_they_are_open() -> None:
    assert is_within(0, 0, 1)
    assert is_within(1.0, 0, 1)
    check_whole("size", 3, 3, 3)
    check_number("share", 1, 0, 1, open_low=True, hint="use less")
    check_number("share", 0, 0, 1, open_high=True, hint="use less")


@pytest.mark.parametrize(
    ("value", "ends"),
    [(-0.1, {}), (1.1, {}), (0, {"open_low": True}), (1, {"open_high": True}), (math.nan, {}), (True, {}), ("1", {})],
)
def test_what_is_outside_is_refused(value: object, ends: dict[str, bool]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^share=.* is not valid: use less\.$"):
        check_number("share", value, 0, 1, hint="use less", **ends)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 10**400])
def test_numbers_are_finite_in_float64(value: float) -> None:
    assert not is_within(value)


def test_choices_and_flags() -> None:
    check_choice("policy", "b", ("a", "b"))
    check_flag("on", False)
    with pytest.raises(InvalidArgumentError, match=r"^policy=\['a'\] is not valid: use 'a' or 'b'\.$"):
        check_choice("policy", ["a"], ("a", "b"))
    with pytest.raises(InvalidArgumentError, match=r"^on=1 is not valid: use True or False\.$"):
        check_flag("on", 1)
