"""The list says of every row what it claims, and of every part what was found, how, and what would hold."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.run import Audit
from vllm_teach.validation.audit.verdict_list import format_verdicts


def test_each_part_has_its_outcome_its_number_how_it_was_found_and_what_is_accepted(small_audit: Audit) -> None:
    text = " ".join(format_verdicts(small_audit.rows).split())
    assert "- CONFIRMED: memory reduction: >= 0.5 holds: half of it: 0.75 of all, counted (at least 0.5 would" in text
    assert "direction only: three times: 9 x, modelled (1.73 to 6 would hold)" in text
    assert "open: 15 s (missing: the tokens)" in text


def test_tables_can_be_chosen_and_have_a_heading_each(small_audit: Audit) -> None:
    lines = format_verdicts(small_audit.rows, "B-motivation", "A-overall").splitlines()
    assert [line for line in lines if line and not line.startswith(("-", " "))] == ["A-overall", "B-motivation"]


def test_lines_keep_to_the_width_and_unknown_tables_are_named(small_audit: Audit) -> None:
    assert max(map(len, format_verdicts(small_audit.rows).splitlines())) <= 112
    with pytest.raises(InvalidArgumentError, match="A-nothing"):
        format_verdicts(small_audit.rows, "A-nothing")
