"""An audit as text, with claim, findings and verdict side by side, and as Markdown. Claims stand as published."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from vllm_teach.validation.audit.check import DIRECTION, FAILS, HOLDS, OPEN
from vllm_teach.validation.audit.finding import FOUND, MEASURED, Finding
from vllm_teach.validation.audit.run import Audit, RowAudit
from vllm_teach.validation.audit.verdict import UNDECIDED
from vllm_teach.validation.comparison import claim
from vllm_teach.validation.tables import Table, get_table

_HEADINGS = ("claim", "measured, counted, read", "modelled, computed, documented", "verdict and why")
_WIDTHS = (22, 30, 30, 40)
_LONG = 0.5  # seconds from which on an experiment is named
_OUTCOMES = {HOLDS: "hold", DIRECTION: "in direction only", FAILS: "fail", OPEN: "are open"}


def format_audit(audit: Audit) -> str:
    """Return the audit as a text of some 130 columns: a block for each table; the numbers of verdicts at the end."""
    lines = [f"audited on {audit.device}, {'quick' if audit.quick else 'full'}, {audit.seconds:.0f} s"]
    for table, rows in _by_table(audit.rows):
        lines += ["", *_heading(table), "", *_line(_HEADINGS), "-+-".join("-" * width for width in _WIDTHS)]
        for row in rows:
            lines += [*_line(tuple("\n".join(cell) for cell in _cells(row))), ""]
    return "\n".join([*lines, *textwrap.wrap(_time(audit), sum(_WIDTHS) + 9), _summary(audit)])


def format_markdown(audit: Audit) -> str:
    """Return the audit as Markdown: where it comes from, and a table for each reference table, with every setting."""
    environment = audit.provenance.get("environment", {})
    versions = environment.get("packages", {}) if isinstance(environment, dict) else {}
    lines = [
        "# The reference tables, audited",
        "",
        f"- device: {audit.device}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items() if version)}",
        f"- commit: {audit.provenance.get('commit') or 'unknown'}, {audit.provenance.get('date')}",
        f"- command: `{audit.provenance.get('command') or 'none'}`, {audit.seconds:.0f} s",
        "",
        f"{_summary(audit)}.",
        "",
        f"{_time(audit)}.",
    ]
    for table, rows in _by_table(audit.rows):
        lines += ["", f"## {table.id}", "", *(f"- {text}" for text in _told_of(table)), ""]
        lines.append(f"| {' | '.join(_HEADINGS)} |")
        lines.append("|" + "---|" * len(_HEADINGS))
        for row in rows:
            cells = ["<br>".join(map(_escape, cell)) for cell in _cells(row, settings=True)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_list(experiments: Iterable[tuple[str, str, str]]) -> str:
    """Return (table, row, what is done) as text, a heading for each table."""
    lines: list[str] = []
    for table_id, rows in groupby(experiments, key=lambda each: each[0]):
        lines += ["", table_id]
        for _, key, about in rows:
            lines += [f"  {key}", *textwrap.wrap(about, 110, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines[1:])


def _by_table(rows: Sequence[RowAudit]) -> Iterable[tuple[Table, list[RowAudit]]]:
    for table_id, group in groupby(rows, key=lambda row: row.experiment.table_id):
        yield get_table(table_id), list(group)


def _heading(table: Table) -> list[str]:
    return [
        line
        for text in (table.id, *_told_of(table))
        for line in textwrap.wrap(text, sum(_WIDTHS) + 9, subsequent_indent="  ")
    ]


def _told_of(table: Table) -> list[str]:
    """Return where the table stands and what it was measured on, its workload, and what is doubtful."""
    workload = ", ".join(f"{key} {value}" for key, value in table.workload.items())
    fields = {"claimed on": table.hardware or "not given", "workload": workload, "caveat": table.caveat}
    place = f"article {table.article}, section {table.section}"
    return [place, *(f"{name}: {text}" for name, text in fields.items() if text)]


def _cells(row: RowAudit, settings: bool = False) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the paragraphs of each column."""
    here = [_told(finding, settings) for finding in row.findings if finding.how in FOUND]
    elsewhere = [_told(finding, settings) for finding in row.findings if finding.how not in FOUND]
    verdict = [row.verdict.verdict.upper(), *(judgement.text for judgement in row.verdict.judgements)]
    if row.stopped is not None:
        verdict.append(f"The experiment broke off: {row.stopped}")
    return [claim(row.experiment.row)], here, elsewhere, verdict


def _told(finding: Finding, settings: bool) -> str:
    how = "" if finding.how == MEASURED else f" [{finding.how.split()[0]}]"
    return f"{finding.name}: {finding.text}{how}" + (f" — {finding.setting}" if settings else "")


def _summary(audit: Audit) -> str:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in audit.counts().items() if number)
    parts = Counter(judgement.outcome for row in audit.rows for judgement in row.verdict.judgements)
    told = ", ".join(f"{parts[outcome]} {words}" for outcome, words in _OUTCOMES.items() if parts[outcome])
    still = [
        f"{row.experiment.table_id}/{row.experiment.key} (missing: {'; '.join(row.verdict.missing)})"
        for row in audit.rows
        if row.verdict.verdict == UNDECIDED
    ]
    undecided = f"; undecided: {', '.join(still)}" if still else ""
    return f"{len(audit.rows)} rows: {counts}; of their parts {told}{undecided}"


def _time(audit: Audit) -> str:
    """Return where the seconds went: what rows share, and the rows' own, the longest first."""
    spent = {f"{name} (shared)": seconds for name, seconds in audit.shared.items()}
    spent |= {f"{row.experiment.table_id}/{row.experiment.key}": row.seconds for row in audit.rows}
    long = sorted((name for name in spent if spent[name] >= _LONG), key=lambda name: -spent[name])
    rest = audit.seconds - sum(spent[name] for name in long)
    told = [f"{name} {spent[name]:.1f} s" for name in long]
    return ", ".join([f"time: {audit.seconds:.0f} s", *told, f"all else {max(0.0, rest):.1f} s"])


def _line(cells: Sequence[str]) -> list[str]:
    """One row of the table, as many lines as its longest cell needs."""
    wrapped = [
        [line for paragraph in cell.split("\n") for line in textwrap.wrap(paragraph, width, subsequent_indent="  ")]
        for cell, width in zip(cells, _WIDTHS, strict=True)
    ]
    height = max(map(len, wrapped))
    padded = [
        [f"{part:<{width}}" for part in cell + [""] * (height - len(cell))]
        for cell, width in zip(wrapped, _WIDTHS, strict=True)
    ]
    return [" | ".join(parts).rstrip() for parts in zip(*padded, strict=True)]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
