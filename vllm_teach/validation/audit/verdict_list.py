"""An audit as a list of verdicts: each row with its claim, each part of it with its number and what is accepted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby

from vllm_teach.validation.audit.check import Undecidable
from vllm_teach.validation.audit.finding import MEASURED
from vllm_teach.validation.audit.run import RowAudit
from vllm_teach.validation.audit.verdict import Judgement
from vllm_teach.validation.comparison import claim
from vllm_teach.validation.tables import get_table

_WIDTH = 112


def format_verdicts(rows: Iterable[RowAudit], *table_ids: str) -> str:
    """Return the rows of these tables, of all for none, as they come; each table with a heading.

    Raises InvalidArgumentError for an unknown table, naming those that exist.
    """
    wanted = {get_table(table_id).id for table_id in table_ids}
    lines: list[str] = []
    for table_id, group in groupby(rows, key=lambda row: row.experiment.table_id):
        if not wanted or table_id in wanted:
            lines += [table_id, *(line for row in group for line in _row(row)), ""]
    return "\n".join(lines[:-1])


def _row(row: RowAudit) -> list[str]:
    head = f"{row.verdict.verdict.upper()}: {claim(row.experiment.row)}"
    lines = textwrap.wrap(head, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    for judgement in row.verdict.judgements:
        lines += textwrap.wrap(_part(judgement), _WIDTH, initial_indent="    ", subsequent_indent="      ")
    return lines


def _part(judgement: Judgement) -> str:
    check, finding = judgement.check, judgement.finding
    if isinstance(check, Undecidable):
        return f"{judgement.outcome}: {check.part} (missing: {check.missing})"
    if finding is None:
        return f"{judgement.outcome}: {check.part} (missing: {check.finding})"
    how = "" if finding.how == MEASURED else f", {finding.how.split()[0]}"
    return f"{judgement.outcome}: {check.part}: {finding.text}{how} ({check.accepted} would hold)"
