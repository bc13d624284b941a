"""The file of an audit: JSON or Markdown by its ending, whole or not at all; and a JSON file read again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.experiment import load_experiments
from vllm_teach.validation.audit.finding import Finding
from vllm_teach.validation.audit.report import format_markdown
from vllm_teach.validation.audit.run import SCHEMA, WHAT, Audit, RowAudit
from vllm_teach.validation.audit.verdict import judge

ENDINGS = (".json", ".md")
_KINDS = {"device": str, "quick": bool, "seconds": int | float, "provenance": dict, "shared": dict, "rows": list}


def check_out(path: Path) -> None:
    """Raise InvalidArgumentError, before minutes are spent, for another ending and where no file can be written."""
    if path.suffix not in ENDINGS:
        raise InvalidArgumentError(f"--out is {str(path)!r}, which ends in none of {', '.join(ENDINGS)}: use one.")
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise InvalidArgumentError(f"--out is {str(path)!r}, which is a folder or lies in none: give a file.")
        _part(path).touch()  # a name may be too long, a folder read-only, a disk full
        _part(path).unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_audit(path: Path, audit: Audit) -> None:
    """Write the audit; an older file stays as it is until the new one is whole. Raises InvalidArgumentError, too."""
    check_out(path)
    text = format_markdown(audit) if path.suffix == ".md" else json.dumps(audit.to_json(), indent=1, allow_nan=False)
    try:
        _part(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        os.replace(_part(path), path)
    except OSError as error:
        _part(path).unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def read_audit(path: Path | str) -> Audit:
    """Return the run that a JSON file holds, judged anew: its findings count, and the rules are those of this version.

    Raises InvalidArgumentError, naming the file, for one that cannot be read, is none of these or of another schema,
    and for findings and rows that cannot be.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if (content["what"], content["schema"]) != (WHAT, SCHEMA):
            raise ValueError(f"what is {content['what']!r} and schema {content['schema']!r}")
        for name, kind in _KINDS.items():
            if not isinstance(content.get(name, {}), kind):
                raise ValueError(f"{name} is {content[name]!r:.80}")
        rows = tuple(_row(each) for each in content["rows"])
        keys = [(row.experiment.table_id, row.experiment.key) for row in rows]
        if len(set(keys)) < len(keys):
            raise ValueError("a row stands there twice")
        told = {name: content[name] for name in ("device", "quick", "seconds", "provenance")}
        return Audit(rows, **told, shared=content.get("shared", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"path={str(path)!r} holds no audit ({error}): write one with `vllm-teach validate --out FILE.json`."
        ) from error


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _unwritable(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"--out is {str(path)!r:.200}, which cannot be written ({error.strerror or error}): give another."
    )


def _row(found: dict[str, Any]) -> RowAudit:
    experiment = load_experiments().get(found["table"], found["key"])
    findings = tuple(Finding(**each) for each in found["findings"])
    return RowAudit(experiment, findings, judge(experiment.checks, findings), found["stopped"], found["seconds"])
