"""Stretched ranges: wider ones never lose what held, bounds stay, and a verdict moves where a finding is passed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import HOLDS, Check, at_least, at_most, near
from vllm_teach.validation.audit.finding import Finding
from vllm_teach.validation.audit.run import Audit
from vllm_teach.validation.audit.tolerance import judge_stretched, rests_on_a_clock, stretched, sweep_tolerance


def measured(value: float) -> Finding:
    return Finding("ratio", value, "x", "measured here", "", value * 0.99, value * 1.01, 5)


def test_a_range_reaches_further_and_towards_no_effect_half_way_at_most() -> None:
    check = near("3 times", "ratio", 3.0, 1.25, "why")
    wider = stretched(check, 2.0)
    assert (wider.low, wider.high) == pytest.approx((math.sqrt(2.4), 7.5))
    assert (stretched(check, 1.1).low, stretched(check, 1.1).high) == pytest.approx((2.4 / 1.1, 3.75 * 1.1))
    assert stretched(near("a third", "ratio", 1 / 3, 1.25, "why"), 2.0).high == pytest.approx(math.sqrt(1 / 2.4))


def test_a_narrow_range_keeps_its_middle_and_bounds_stay() -> None:
    assert stretched(Check("p", "f", 2.0, 8.0, "why"), 0.1).low == pytest.approx(4.0)
    for bound in (at_least("p", "f", 1.05, "why", 1.0), at_most("p", "f", 135.0, "why"), Check("p", "f", 2, 2, "why")):
        assert stretched(bound, 3.0) == bound


@given(
    st.floats(0.05, 50), st.floats(1, 3), st.floats(0.05, 60), st.floats(1, 10), st.booleans()
)  # fmt: skip
def test_what_held_still_holds_in_a_wider_range(
    claimed: float, within: float, value: float, factor: float, ratio: bool
) -> None:
    check = near("p", "ratio", claimed, within, "why", 1.0 if ratio and abs(math.log(claimed)) > 0.1 else None)
    if check.outcome(measured(value)) == HOLDS:
        assert stretched(check, factor).outcome(measured(value)) == HOLDS


def test_a_modelled_row_rests_on_no_clock_and_moves_with_its_range(small_audit: Audit) -> None:
    row = small_audit.row("B-flash-attention", "time_ms")
    assert not rests_on_a_clock(row)
    assert judge_stretched(row, 1.0) == row.verdict
    assert row.verdict.verdict == "partly"
    assert judge_stretched(row, 1.5).verdict == "confirmed"


def test_a_sweep_counts_all_rows_at_each_factor(small_audit: Audit) -> None:
    sweep = sweep_tolerance(small_audit.rows, (1, 1.5))
    assert sweep.num_rows == 3
    assert sweep.counts == {"confirmed": (1, 2), "partly": (1, 0), "contradicted": (0, 0), "cannot be decided": (1, 1)}


def test_nothing_to_judge_and_no_factor_are_refused(small_audit: Audit) -> None:
    for arguments in (((), (1,)), (small_audit.rows, ())):
        with pytest.raises(InvalidArgumentError):
            sweep_tolerance(*arguments)
    with pytest.raises(InvalidArgumentError, match="factor=0"):
        stretched(Check("p", "f", 2.0, 8.0, "why"), 0)
