import math
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import HOLDS, Check, Undecidable, at_least
from vllm_teach.validation.audit.experiment import Experiment, Register, load_experiments
from vllm_teach.validation.audit.finding import Finding, counted
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY, judge
from vllm_teach.validation.tables import load_tables

EXPERIMENTS = list(load_experiments())
CHECK = at_least("enough", "bytes", 1, "why")


def names(experiments: list[Experiment]) -> list[str]:
    return [f"{each.table_id}/{each.key}" for each in experiments]


def something(lab: Lab) -> Iterator[Finding]:
    """Count something."""
    yield counted("bytes", 1, "", "here")


def test_every_row_of_every_table_has_an_experiment() -> None:
    assert load_experiments().missing() == []
    assert names(EXPERIMENTS) == [f"{table.id}/{key}" for table in load_tables().values() for key in table.keys]


def test_a_row_without_an_experiment_is_told() -> None:
    register = Register()
    register.experiment("A-attention-2048", "attention_time_fraction_of_baseline", CHECK)(something)
    missing = register.missing()
    assert len(missing) == sum(len(table.rows) for table in load_tables().values()) - 1
    assert ("A-attention-2048", "attention_time_fraction_of_baseline") not in missing
    with pytest.raises(InvalidArgumentError, match="has no experiment"):
        register.get("A-overall", "memory_reduction")


def test_a_row_cannot_have_two_experiments() -> None:
    register = Register()
    register.experiment("A-overall", "memory_reduction", CHECK)(something)
    with pytest.raises(InvalidArgumentError, match="has an experiment already"):
        register.experiment("A-overall", "memory_reduction", CHECK)


@pytest.mark.parametrize(("table_id", "key"), [("A-overall", "memory"), ("C-overall", "memory_reduction")])
def test_a_row_that_does_not_exist_is_refused(table_id: str, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="use one of"):
        Register().experiment(table_id, key, CHECK)


def test_no_checks_and_no_docstring_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="say what would confirm"):
        Register().experiment("A-overall", "memory_reduction")
    with pytest.raises(InvalidArgumentError, match="no docstring"):
        Register().experiment("A-overall", "memory_reduction", CHECK)(lambda lab: iter(()))


def made_to(experiment: Experiment, hold: bool) -> list[Finding]:
    """Findings inside, or far outside and on the wrong side of, the range of every check."""

    def value(check: Check) -> float:
        if hold:
            end, step = (check.low, 1) if math.isfinite(check.low) else (check.high, -1)
            return end + step / 2 if end == check.neutral else end  # "more than" a value that would mean no effect
        if check.neutral is not None:
            return check.neutral - 1 if check.low >= check.neutral else check.neutral + 1
        return check.high * 2 + 1 if math.isfinite(check.high) else check.low - 1

    by_name = {check.finding: value(check) for check in experiment.checks if isinstance(check, Check)}
    return [counted(name, number, "", "made up") for name, number in by_name.items()]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=names(EXPERIMENTS))
def test_no_verdict_is_written_down_each_follows_from_the_findings(experiment: Experiment) -> None:
    decidable = not any(isinstance(check, Undecidable) for check in experiment.checks)
    good = judge(experiment.checks, made_to(experiment, hold=True))
    shared = len({check.finding for check in experiment.checks if isinstance(check, Check)}) < len(experiment.checks)
    if not shared:
        assert {each.outcome for each in good.judgements if isinstance(each.check, Check)} == {HOLDS}
        assert good.verdict == (CONFIRMED if decidable else PARTLY)
    assert judge(experiment.checks, made_to(experiment, hold=False)).verdict == CONTRADICTED


def test_at_most_five_rows_can_never_be_decided() -> None:
    hopeless = [each for each in EXPERIMENTS if all(isinstance(check, Undecidable) for check in each.checks)]
    assert len(hopeless) <= 5, names(hopeless)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=names(EXPERIMENTS))
def test_every_check_gives_its_reason_and_every_experiment_says_what_it_does(experiment: Experiment) -> None:
    assert len(experiment.about) > 20
    assert experiment.about.endswith(".")
    for check in experiment.checks:
        told = check.missing if isinstance(check, Undecidable) else check.why
        assert len(told) > 2, check


def test_reading_the_experiments_loads_no_torch() -> None:
    code = (
        "import sys; from vllm_teach.validation.audit.experiment import load_experiments; "
        "assert len(list(load_experiments())) > 60; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
