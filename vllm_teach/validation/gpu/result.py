"""The result file of `vllm_teach.validation.gpu`: what is in it, how it is written, and how it is read back.

A figure counts only with its provenance: the file names the device, the versions, the commit, the command and the date.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_teach.errors import InvalidArgumentError

SCHEMA = 1
WHAT = "vllm_teach.validation.gpu"

Record = dict[str, Any]
"""One check or measurement. `kind` is "check", "time", "memory", "tile", "rate" or "skipped"; `name` says of what."""

_KINDS = ("check", "time", "memory", "tile", "rate", "skipped")
_PROVENANCE = ("device", "gpus", "driver", "cuda", "packages", "python")


@dataclass
class SectionResult:
    """What a section did. `not_run` are the items for which no time was left, `failures` those that raised."""

    name: str
    about: str
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


@dataclass
class Result:
    """A run of the script. `machine` is from `machine.describe`; `commit` is None outside a git checkout."""

    date: str
    command: str
    commit: str | None
    dry_run: bool
    limit_seconds: float
    machine: dict[str, Any]
    sections: list[SectionResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing raised and no check was off. What was not run counts for neither side."""
        return not self.failed()

    def failed(self) -> list[str]:
        """Return "section: item" of each failure and each check that did not pass."""
        return [f"{section.name}: {name}" for section in self.sections for name in _failed(section)]

    def records(self, **wanted: object) -> list[Record]:
        """Return the records of all sections whose fields have the `wanted` values."""
        every = [record for section in self.sections for record in section.records]
        return [record for record in every if all(record.get(key) == value for key, value in wanted.items())]


def _failed(section: SectionResult) -> list[str]:
    off = [record["name"] for record in section.records if record["kind"] == "check" and not record["passed"]]
    return [failure["item"] for failure in section.failures] + off


def result_path(folder: Path, result: Result) -> Path:
    """Return `folder`/<gpu's name>-<date>.json, in lower case and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", str(result.machine["device"]).lower()).strip("-")
    return folder / f"{name}-{result.date[:10]}.json"


def save(result: Result, path: Path) -> None:
    """Write the result to `path`, whole or not at all, so that a run that is killed leaves what the last one wrote."""
    content = {"schema": SCHEMA, "what": WHAT, "passed": result.passed, **asdict(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def load_result(path: Path | str) -> Result:
    """Return the run that `path` holds.

    Raises InvalidArgumentError, naming the file and the field, for a file that is not there, is none of these, is of
    another schema, lacks a field, has a record of an unknown kind, or comes from a dry run: its figures are those of an
    interpreter.
    """
    content = _read(Path(path))
    for key, wanted in (("what", WHAT), ("schema", SCHEMA)):
        if content.get(key) != wanted:
            raise InvalidArgumentError(f"path={str(path)!r} has {key}={content.get(key)!r}; give one with {wanted!r}.")
    sections = [SectionResult(**_fields(path, SectionResult, section)) for section in content.get("sections", [])]
    result = Result(**_fields(path, Result, content) | {"sections": sections})
    if result.dry_run:
        raise InvalidArgumentError(f"path={str(path)!r} is of a dry run; its figures say nothing about a GPU.")
    for missing in (name for name in _PROVENANCE if name not in result.machine):
        raise InvalidArgumentError(f"path={str(path)!r} has no {missing!r} in 'machine'; run the script again.")
    for record in result.records():
        if record.get("kind") not in _KINDS or "name" not in record:
            raise InvalidArgumentError(f"path={str(path)!r} has the record {record!r}; it needs a name and a kind.")
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"path={str(path)!r} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise InvalidArgumentError(f"path={str(path)!r} is no JSON ({error}).") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"path={str(path)!r} holds a {type(content).__name__}; a result is an object.")
    return content


def _fields(path: Path | str, kind: type, content: dict[str, Any]) -> dict[str, Any]:
    wanted = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in wanted:
        if name not in content:
            raise InvalidArgumentError(f"path={str(path)!r} has no {name!r}; run the script again.")
    return {name: content[name] for name in wanted}
