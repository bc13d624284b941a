"""A run of the audit: every experiment of the tables asked for, one after the other, and what came of each."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_teach.errors import VllmTeachError
from vllm_teach.validation.audit.check import Undecidable
from vllm_teach.validation.audit.experiment import Experiment, Register, load_experiments
from vllm_teach.validation.audit.finding import Finding
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.verdict import VERDICTS, Verdict, judge
from vllm_teach.validation.comparison import claim
from vllm_teach.validation.tables import get_table

WHAT, SCHEMA = "vllm-teach validate", 1


@dataclass(frozen=True)
class RowAudit:
    """One row: the experiment, what it found, the verdict, and why it broke off (None: it did not).

    `seconds` are its own, without what it shares with other rows.
    """

    experiment: Experiment
    findings: tuple[Finding, ...]
    verdict: Verdict
    stopped: str | None
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return it as what `json.dump` takes; the claim stands there as published."""
        row = self.experiment.row
        return {
            "table": row.table_id,
            "key": row.key,
            "claim": {row.kind: row.name, **{name: _plain(value) for name, value in row.values.items()}},
            "claim_text": claim(row),
            "experiment": self.experiment.about,
            "findings": [asdict(finding) for finding in self.findings],
            "verdict": self.verdict.verdict,
            "parts": [_part(judgement) for judgement in self.verdict.judgements],
            "missing": list(self.verdict.missing),
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Audit:
    """A whole run: its rows in the tables' order, where they come from, and seconds: in all, and what rows `shared`."""

    rows: tuple[RowAudit, ...]
    device: str
    quick: bool
    seconds: float
    provenance: dict[str, object] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Return how many rows have each of the verdicts."""
        return {verdict: sum(row.verdict.verdict == verdict for row in self.rows) for verdict in VERDICTS}

    def row(self, table_id: str, key: str) -> RowAudit:
        """Return one row; raises InvalidArgumentError for one that no table has, KeyError for one not in this run."""
        get_table(table_id).row(key)
        return {(row.experiment.table_id, row.experiment.key): row for row in self.rows}[table_id, key]

    def to_json(self) -> dict[str, object]:
        """Return the run as what `json.dump` takes."""
        return {
            "what": WHAT,
            "schema": SCHEMA,
            "device": self.device,
            "quick": self.quick,
            "seconds": round(self.seconds, 1),
            "shared": {name: round(spent, 3) for name, spent in self.shared.items()},
            "verdicts": self.counts(),
            "rows": [row.to_json() for row in self.rows],
            "provenance": self.provenance,
        }


def audit_tables(
    lab: Lab,
    table_ids: Sequence[str] | None = None,
    announce: Callable[[Experiment], object] | None = None,
    command: str = "",
    experiments: Register | None = None,
) -> Audit:
    """Run the experiments of the tables `table_ids`, of all for None, and judge every row.

    A typed error, or too little memory, ends an experiment, not the run: what it found until then counts, and the row
    says what stopped it. `announce` is told each experiment before it runs. Raises InvalidArgumentError for an unknown
    table.
    """
    wanted = None if table_ids is None else {get_table(table_id).id for table_id in table_ids}
    chosen = [each for each in experiments or load_experiments() if wanted is None or each.table_id in wanted]
    started = time.perf_counter()
    rows = []
    for each in chosen:
        if announce is not None:
            announce(each)
        rows.append(audit_row(each, lab))
    spent = time.perf_counter() - started
    return Audit(tuple(rows), lab.label, lab.quick, spent, describe_run(command), dict(lab.shared))


def audit_row(experiment: Experiment, lab: Lab) -> RowAudit:
    """Run one experiment and judge its row."""
    started, shared = time.perf_counter(), sum(lab.shared.values())
    found, stopped = _collect(experiment.find(lab))
    verdict = judge(experiment.checks, found)
    own = time.perf_counter() - started - (sum(lab.shared.values()) - shared)
    return RowAudit(experiment, tuple(found), verdict, stopped, own)


def describe_run(command: str) -> dict[str, object]:
    """Return where a run's figures come from: versions, device, commit, command and date."""
    from vllm_teach.performance.environment import describe_environment
    from vllm_teach.validation.gpu.machine import commit

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"environment": asdict(describe_environment()), "commit": commit(), "command": command, "date": now}


def _collect(findings: Iterable[Finding]) -> tuple[list[Finding], str | None]:
    found: list[Finding] = []
    try:
        for finding in findings:
            found.append(finding)  # one by one: what was found before an error counts
    except VllmTeachError as error:
        return found, str(error)
    except (MemoryError, RuntimeError) as error:
        # PyTorch has no type of its own for a processor's; anything else is a fault, which shows.
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        return found, "There was too little memory for this experiment."
    return found, None


def _part(judgement: Any) -> dict[str, object]:
    check = judgement.check
    rule = (
        {}
        if isinstance(check, Undecidable)
        else {"finding": check.finding, "accepts": check.accepted, "why": check.why}
    )
    return {"part": check.part, "outcome": judgement.outcome, **rule}


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value
