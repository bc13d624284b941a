"""The audit: every row of the reference tables has an experiment, and every experiment ends in a verdict.

- What is found: `finding` (a number and how it was come by), `lab` (what measures it, once for all rows that need it),
  `a100` (what a data sheet's A100 would take; always labelled "modelled").
- What follows from it: `check` (which values of a finding confirm a claim, and why), `verdict` (the rule).
- How a row gets both: `experiment` (the decorator and the register), `experiments/` (one file for each group of rows).
- How a run goes: `run` (all experiments of some tables), `report` (as text and Markdown), `result_file` (on disk).
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Audit": "run",
    "Check": "check",
    "Experiment": "experiment",
    "Finding": "finding",
    "Lab": "lab",
    "RowAudit": "run",
    "Verdict": "verdict",
    "audit_tables": "run",
    "format_audit": "report",
    "judge": "verdict",
    "load_experiments": "experiment",
    "read_audit": "result_file",
    "write_audit": "result_file",
}

__all__ = [
    "Audit",
    "Check",
    "Experiment",
    "Finding",
    "Lab",
    "RowAudit",
    "Verdict",
    "audit_tables",
    "format_audit",
    "judge",
    "load_experiments",
    "read_audit",
    "write_audit",
]

if TYPE_CHECKING:
    from vllm_teach.validation.audit.check import Check
    from vllm_teach.validation.audit.experiment import Experiment, load_experiments
    from vllm_teach.validation.audit.finding import Finding
    from vllm_teach.validation.audit.lab import Lab
    from vllm_teach.validation.audit.report import format_audit
    from vllm_teach.validation.audit.result_file import read_audit, write_audit
    from vllm_teach.validation.audit.run import Audit, RowAudit, audit_tables
    from vllm_teach.validation.audit.verdict import Verdict, judge


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
