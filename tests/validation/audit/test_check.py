import math

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import (
    DIRECTION,
    FAILS,
    HOLDS,
    OPEN,
    Check,
    at_least,
    at_most,
    between,
    near,
    published,
)
from vllm_teach.validation.audit.finding import Finding


def found(value: float, low: float | None = None, high: float | None = None) -> Finding:
    ends = (value if low is None else low, value if high is None else high)
    return Finding("ratio", value, "x", "counted here", "here", *ends)


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(1.7, DIRECTION), (1.74, HOLDS), (3.0, HOLDS), (6.0, HOLDS), (6.1, DIRECTION), (1.0, FAILS), (0.5, FAILS)],
)
def test_a_ratio_of_three_holds_within_a_factor_of_two_but_not_near_no_effect(value: float, outcome: str) -> None:
    assert near("three times", "ratio", 3.0, 2.0, "why").outcome(found(value)) == outcome


def test_a_small_ratio_is_not_confirmed_by_hardly_any_effect() -> None:
    check = near("1.9 times", "ratio", 1.9, 2.0, "why")
    assert check.low == pytest.approx(math.sqrt(1.9))
    assert check.outcome(found(1.1)) == DIRECTION


def test_a_claim_below_one_is_the_mirror_image() -> None:
    check = near("0.23 of the time", "ratio", 0.23, 2.0, "why")
    assert (check.low, check.high) == pytest.approx((0.115, 0.46))
    assert check.outcome(found(0.9)) == DIRECTION
    assert check.outcome(found(1.2)) == FAILS


def test_a_direction_needs_the_whole_spread_on_its_side() -> None:
    check = near("three times", "ratio", 3.0, 2.0, "why")
    assert check.outcome(found(1.3, 1.1, 1.5)) == DIRECTION
    assert check.outcome(found(1.3, 0.9, 1.5)) == FAILS


def test_a_spread_that_reaches_over_no_effect_confirms_nothing() -> None:
    assert near("three times", "ratio", 3.0, 2.0, "why").outcome(found(3.0, 0.9, 5.0)) == FAILS
    assert at_least("it pays", "ratio", 1.05, "why", 1.0).outcome(found(1.23, 0.2, 3.7)) == FAILS
    assert at_least("it is there", "ratio", 1.05, "why").outcome(found(1.23, 0.2, 3.7)) == HOLDS


def test_hardly_any_effect_has_no_direction() -> None:
    check = near("2.9 times", "ratio", 2.9, 2.0, "why")
    assert check.outcome(found(1.001)) == FAILS
    assert check.outcome(found(1.1)) == DIRECTION


def test_without_a_neutral_value_there_is_no_direction() -> None:
    assert near("68 %", "ratio", 0.68, 1.25, "why", None).outcome(found(0.5)) == FAILS


def test_a_bound_at_no_effect_is_not_reached_by_no_effect() -> None:
    for check in (at_least("rises", "ratio", 1, "why", 1.0), at_most("falls", "ratio", 1, "why", 1.0)):
        assert check.outcome(found(1.0)) == FAILS
    assert at_least("rises", "ratio", 1, "why", 1.0).outcome(found(1.01)) == HOLDS


def test_bounds_include_their_limit() -> None:
    assert at_least("enough", "ratio", 0.6, "why").outcome(found(0.6)) == HOLDS
    assert at_most("few enough", "ratio", 4, "why").outcome(found(4)) == HOLDS
    assert at_most("few enough", "ratio", 4, "why").outcome(found(5)) == FAILS
    assert at_most("saves", "ratio", 0.5, "why", neutral=1.0).outcome(found(0.7)) == DIRECTION


def test_a_range_is_widened_by_its_factor() -> None:
    check = between("2 to 4", "ratio", 2, 4, "why", 1.25)
    assert (check.low, check.high) == (1.6, 5.0)


def test_by_spread_a_finding_holds_that_reaches_into_the_range() -> None:
    check = Check("2 to 3 %", "ratio", 2, 3, "why", 0.0, by_spread=True)
    assert check.outcome(found(10.0, 2.9, 10.0)) == HOLDS
    assert check.outcome(found(10.0, 4.0, 10.0)) == DIRECTION


def test_no_finding_leaves_it_open() -> None:
    assert at_least("enough", "ratio", 1, "why").outcome(None) == OPEN


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (near("x", "ratio", 3.0, 2.0, "why"), "1.73 to 6"),
        (at_least("x", "ratio", 0.6, "why"), "at least 0.6"),
        (at_most("x", "ratio", 4, "why"), "at most 4"),
        (at_least("x", "ratio", 1, "why", 1.0), "more than 1"),
        (at_most("x", "ratio", 1, "why", 1.0), "less than 1"),
        (between("x", "ratio", 1, 1, "why", neutral=None), "exactly 1"),
    ],
)
def test_what_is_accepted_is_told_in_words(check: Check, words: str) -> None:
    assert check.accepted == words


def test_a_range_without_a_reason_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="why of 'x' is empty"):
        at_least("x", "ratio", 1, " ")


def test_an_empty_range_and_one_around_the_neutral_value_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="above high"):
        between("x", "ratio", 3, 2, "why")
    with pytest.raises(InvalidArgumentError, match="decides nothing"):
        between("x", "ratio", 0.5, 2, "why")


def test_a_tolerance_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"within=0\.5"):
        near("x", "ratio", 3.0, 0.5, "why")


def test_published_numbers_come_from_the_table() -> None:
    look_up = published("B-flash-attention")
    assert look_up("time_ms", "baseline") == 185
    with pytest.raises(InvalidArgumentError, match="name='median'"):
        look_up("time_ms", "median")
    with pytest.raises(InvalidArgumentError, match="is not in table"):
        look_up("speed", "baseline")
