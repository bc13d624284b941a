import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import FAILS, HOLDS, Undecidable, at_least, at_most, near
from vllm_teach.validation.audit.finding import counted
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY, UNDECIDED, judge

FAST = near("three times as fast", "speed", 3.0, 2.0, "a factor of 2")
SMALL = at_most("half the memory", "memory", 0.5, "exact")
OPEN_PART = Undecidable("15 s", "the number of tokens")


def speed(value: float):  # type: ignore[no-untyped-def]
    return counted("speed", value, "x", "here")


def memory(value: float):  # type: ignore[no-untyped-def]
    return counted("memory", value, "", "here")


@pytest.mark.parametrize(
    ("fast", "small", "verdict"),
    [
        (3.0, 0.4, CONFIRMED),
        (3.0, 0.6, PARTLY),
        (9.0, 0.4, PARTLY),
        (9.0, 0.6, PARTLY),
        (0.9, 0.4, PARTLY),
        (0.9, 0.6, CONTRADICTED),
    ],
)
def test_the_verdict_follows_from_the_findings(fast: float, small: float, verdict: str) -> None:
    assert judge([FAST, SMALL], [speed(fast), memory(small)]).verdict == verdict


def test_a_direction_alone_is_partly() -> None:
    assert judge([FAST], [speed(9.0)]).verdict == PARTLY


def test_what_no_one_can_decide_is_named() -> None:
    found = judge([OPEN_PART], [speed(3.0)])
    assert found.verdict == UNDECIDED
    assert found.missing == ("the number of tokens",)


def test_an_open_part_keeps_a_claim_from_being_confirmed_and_saves_it_from_nothing() -> None:
    assert judge([FAST, OPEN_PART], [speed(3.0)]).verdict == PARTLY
    assert judge([FAST, OPEN_PART], [speed(0.9)]).verdict == CONTRADICTED


def test_a_finding_that_was_not_made_leaves_its_part_open() -> None:
    found = judge([FAST, SMALL], [speed(3.0)])
    assert found.verdict == PARTLY
    assert found.missing == ("memory",)
    assert judge([FAST], []).verdict == UNDECIDED


def test_an_optional_check_counts_only_where_it_was_made() -> None:
    on_a_gpu = at_least("185 ms", "milliseconds", 100, "there", None)
    optional = type(on_a_gpu)(**{**vars(on_a_gpu), "optional": True})
    assert judge([FAST, optional], [speed(3.0)]).verdict == CONFIRMED
    assert judge([FAST, optional], [speed(3.0), counted("milliseconds", 3, "ms", "here")]).verdict == PARTLY


def test_each_part_says_what_was_found_and_what_would_hold() -> None:
    found = judge([FAST, SMALL], [speed(2.0), memory(0.9)])
    assert [each.outcome for each in found.judgements] == [HOLDS, FAILS]
    assert found.judgements[1].text == "half the memory: fails, 0.9 (at most 0.5 would hold: exact)"
    assert "the number of tokens is missing" in judge([OPEN_PART], []).judgements[0].text


def test_no_checks_and_two_findings_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="checks is empty"):
        judge([], [speed(3.0)])
    with pytest.raises(InvalidArgumentError, match="'speed' twice"):
        judge([FAST], [speed(3.0), speed(4.0)])
