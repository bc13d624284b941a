import json
import time
from collections.abc import Iterator

import pytest

from vllm_teach.errors import InvalidArgumentError, ModelNotFoundError
from vllm_teach.validation.audit.check import at_least
from vllm_teach.validation.audit.experiment import Register
from vllm_teach.validation.audit.finding import Finding, counted
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.run import Audit, audit_tables
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY, UNDECIDED

FIRST = at_least("a first part", "first", 1, "why")
SECOND = at_least("a second part", "second", 1, "why")


def register_with(first: float | None, second: float | None) -> Register:
    register = Register()

    @register.experiment("A-overall", "memory_reduction", FIRST, SECOND)
    def find(lab: Lab) -> Iterator[Finding]:
        """Count twice."""
        if first is None:
            raise ModelNotFoundError("model 'x' is not here.")
        yield counted("first", first, "", "made up")
        if second is None:
            raise ModelNotFoundError("model 'y' is not here.")
        yield counted("second", second, "", "made up")

    return register


def run(first: float | None, second: float | None) -> Audit:
    return audit_tables(Lab(), experiments=register_with(first, second), command="test")


@pytest.mark.parametrize(
    ("first", "second", "verdict"), [(1, 1, CONFIRMED), (1, 0, PARTLY), (0, 0, CONTRADICTED), (0, 1, PARTLY)]
)
def test_another_finding_another_verdict(first: float, second: float, verdict: str) -> None:
    audit = run(first, second)
    assert audit.row("A-overall", "memory_reduction").verdict.verdict == verdict
    assert audit.counts() == {**dict.fromkeys((CONFIRMED, PARTLY, CONTRADICTED, UNDECIDED), 0), verdict: 1}


def test_what_was_found_before_an_error_counts_and_the_row_says_what_stopped_it() -> None:
    row = run(1, None).row("A-overall", "memory_reduction")
    assert row.verdict.verdict == PARTLY
    assert row.verdict.missing == ("second",)
    assert row.stopped == "model 'y' is not here."


def test_an_experiment_that_finds_nothing_is_undecided_and_the_run_goes_on() -> None:
    row = run(None, 1).row("A-overall", "memory_reduction")
    assert (row.verdict.verdict, row.findings) == (UNDECIDED, ())


def test_only_the_tables_asked_for_are_run() -> None:
    register = register_with(1, 1)
    register.experiment("B-motivation", "a_200b_parameter_dialogue_model_15_s_per", FIRST)(lambda_with_docstring)
    told: list[str] = []
    audit = audit_tables(Lab(), ["B-motivation"], lambda each: told.append(each.key), experiments=register)
    assert told == ["a_200b_parameter_dialogue_model_15_s_per"]
    assert [row.experiment.table_id for row in audit.rows] == ["B-motivation"]


def lambda_with_docstring(lab: Lab) -> Iterator[Finding]:
    """Count once."""
    yield counted("first", 1, "", "made up")


def test_an_unknown_table_is_refused_and_those_that_exist_are_told() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'B-flash' is no reference table: use one of .*B-flash-attention"):
        audit_tables(Lab(), ["B-flash"])


def test_the_json_has_the_claim_as_published_and_where_it_comes_from() -> None:
    found = json.loads(json.dumps(run(1, 0).to_json(), allow_nan=False))
    row = found["rows"][0]
    assert row["claim"] == {"metric": "memory_reduction", "at_least": 0.5}
    assert row["verdict"] == PARTLY
    assert row["parts"][1] == {
        "part": "a second part", "outcome": "fails", "finding": "second", "accepts": "at least 1", "why": "why"
    }  # fmt: skip
    assert found["provenance"]["command"] == "test"
    assert found["provenance"]["environment"]["packages"]["torch"]


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried", "DefaultCPUAllocator: can't allocate memory: you"])
def test_too_little_memory_ends_an_experiment_and_not_the_run(message: str) -> None:
    register = Register()

    @register.experiment("A-overall", "memory_reduction", FIRST)
    def find(lab: Lab) -> Iterator[Finding]:
        """Ask for more than there is."""
        yield from ()
        raise RuntimeError(message)

    row = audit_tables(Lab(), experiments=register).rows[0]
    assert row.stopped == "There was too little memory for this experiment."
    assert row.verdict.verdict == UNDECIDED


def test_a_fault_of_an_experiment_is_not_hidden() -> None:
    register = Register()

    @register.experiment("A-overall", "memory_reduction", FIRST)
    def find(lab: Lab) -> Iterator[Finding]:
        """Fail."""
        yield from ()
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        audit_tables(Lab(), experiments=register)


def test_what_rows_share_is_no_rows_own_time() -> None:
    register = Register()

    def measure_long(lab: Lab) -> float:
        deadline = time.perf_counter() + 0.02
        while time.perf_counter() < deadline:
            pass
        return 1.0

    @register.experiment("A-overall", "memory_reduction", FIRST)
    def find(lab: Lab) -> Iterator[Finding]:
        """Measure for others as well."""
        yield counted("first", lab.once(measure_long), "", "made up")

    audit = audit_tables(Lab(), experiments=register)
    assert audit.shared["measure long"] >= 0.02
    assert audit.rows[0].seconds <= audit.seconds - audit.shared["measure long"]
    assert audit.to_json()["shared"] == {"measure long": round(audit.shared["measure long"], 3)}
