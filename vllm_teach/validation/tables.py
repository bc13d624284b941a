"""The figures and the advice that two articles publish, read from `data/reference_tables.yaml` and checked.

They are claims to be examined. Nothing here changes one; the file is a transcription whose checksum a test knows.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError

FILE = "reference_tables.yaml"

_NUMBER, _TEXT, _RANGE = "a number", "a text", "a mapping of bounds"
_BOUNDS = {"low": _NUMBER, "high": _NUMBER, "above": _NUMBER, "below": _NUMBER, "at_least": _NUMBER, "at_most": _NUMBER}

# What each kind of row may hold besides the key that names its kind, and what those values are.
ROW_KEYS: dict[str, dict[str, str]] = {
    "metric": {
        **_BOUNDS,
        **dict.fromkeys(("seq_len", "value", "baseline", "optimised", "ratio", "reduction"), _NUMBER),
    },
    "claim": {},
    "mode": {"time_ms": _NUMBER, "memory_mb": _NUMBER, "accuracy_change": _TEXT},
    "method": {"accuracy_loss_percent": _RANGE, "speedup": _NUMBER, "use": _TEXT},
    "system": {"qps": _NUMBER, "p99_ms": _NUMBER, "gpu_memory_gb": _NUMBER},
    "symptom": {"check": _TEXT, "fix": _TEXT},
    "feature": {},
    "scenario": {"attention": _TEXT},
}
_TABLE_KEYS = {"id", "article", "section", "hardware", "workload", "rows", "scenarios", "tiles", "caveat"}
_FORMS = {
    **dict.fromkeys(("id", "article", "hardware", "caveat"), str),
    **dict.fromkeys(("workload", "tiles"), dict),
    **dict.fromkeys(("rows", "scenarios"), list),
}


@dataclass(frozen=True)
class Row:
    """One claim. `kind` is a key of ROW_KEYS, `name` the text of that key, `values` the rest, read-only.

    `key` names the row within its table and does not depend on the rows' order: the name in snake case, shortened to
    whole words, with "@2048" behind it where the claim is about one sequence length.
    """

    table_id: str
    key: str
    kind: str
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One published table: its place, what it was measured on, its rows (scenarios last), and what is doubtful."""

    id: str
    article: str
    section: str
    hardware: str
    workload: Mapping[str, Any]
    tiles: Mapping[str, Any]
    rows: tuple[Row, ...]
    caveat: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The rows' keys, in the table's order."""
        return tuple(row.key for row in self.rows)

    def row(self, key: str) -> Row:
        """Return the row of that key; raises InvalidArgumentError that lists the keys."""
        for row in self.rows:
            if row.key == key:
                return row
        raise InvalidArgumentError(f"row {key!r} is not in table {self.id!r}: use one of {', '.join(self.keys)}.")


def get_table(table_id: str) -> Table:
    """Return one table; raises InvalidArgumentError that lists the ids."""
    tables = load_tables()
    if not isinstance(table_id, str) or table_id not in tables:
        raise InvalidArgumentError(f"table_id={table_id!r} is no reference table: use one of {', '.join(tables)}.")
    return tables[table_id]


@functools.cache
def load_tables(path: Path | None = None) -> Mapping[str, Table]:
    """Read all tables, by id and in the file's order; `path` reads another file of the same form.

    Raises InvalidArgumentError for the first thing that the schema does not know: a key, a type, a repeated row;
    also for a `path` that is not there or holds no YAML.
    """
    content = _read(data.path(FILE) if path is None else path)
    if not isinstance(content, dict) or set(content) != {"tables"} or not isinstance(content["tables"], list):
        raise InvalidArgumentError(f"path={str(path)!r} is no file of reference tables: it needs one list, 'tables'.")
    tables = [_table(entry) for entry in content["tables"]]
    _refuse_repeats("the reference tables", [table.id for table in tables])
    return MappingProxyType({table.id: table for table in tables})


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise InvalidArgumentError(f"path={str(path)!r} cannot be read ({why}): name a file of tables.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidArgumentError(f"path={str(path)!r} is no YAML ({why}): mend the file.") from error


def _table(entry: dict[str, Any]) -> Table:
    _check_form("an entry of 'tables'", entry, dict)
    where = f"table {entry.get('id', '?')!r}"
    _refuse_unknown(where, entry, _TABLE_KEYS)
    for key in ("id", "article", "rows"):
        if key not in entry:
            raise InvalidArgumentError(f"{where} has no {key!r}: add it.")
    for key, form in _FORMS.items():
        if key in entry:
            _check_form(f"{key!r} of {where}", entry[key], form)
    rows = [_row(entry["id"], row) for row in entry["rows"]]
    rows += [_row(entry["id"], _as_scenario(scenario)) for scenario in entry.get("scenarios", [])]
    _refuse_repeats(where, [row.key for row in rows])
    return Table(
        id=entry["id"],
        article=entry["article"],
        section=str(entry.get("section", "")),
        hardware=entry.get("hardware", ""),
        workload=MappingProxyType(entry.get("workload", {})),
        tiles=MappingProxyType(entry.get("tiles", {})),
        rows=tuple(rows),
        caveat=" ".join(entry.get("caveat", "").split()),
    )


def _as_scenario(entry: dict[str, Any]) -> dict[str, Any]:
    """A scenario names itself by `use`, which rows of other kinds have as a value."""
    _check_form("a scenario", entry, dict)
    return {"scenario" if key == "use" else key: value for key, value in entry.items()}


def _row(table_id: str, entry: dict[str, Any]) -> Row:
    where = f"a row of table {table_id!r}"
    _check_form(where, entry, dict)
    kinds = [kind for kind in ROW_KEYS if kind in entry]
    if len(kinds) != 1:
        raise InvalidArgumentError(f"{where} has the kinds {kinds}: give it exactly one of {', '.join(ROW_KEYS)}.")
    kind = kinds[0]
    values = {key: value for key, value in entry.items() if key != kind}
    _refuse_unknown(f"{where} of kind {kind!r}", values, set(ROW_KEYS[kind]))
    _check_type(where, kind, entry[kind], _TEXT)
    for key, value in values.items():
        _check_type(where, key, value, ROW_KEYS[kind][key])
    key = _snake(entry[kind]) + (f"@{values['seq_len']}" if "seq_len" in values else "")
    return Row(table_id, key, kind, entry[kind], MappingProxyType(values))


def _snake(text: str, longest: int = 48) -> str:
    words = re.findall(r"[a-z0-9]+(?:\.[0-9]+)*", text.lower())
    key = ""
    for word in words:
        if key and len(key) + 1 + len(word) > longest:
            break
        key = f"{key}_{word}" if key else word
    return key


def _check_form(where: str, value: object, form: type) -> None:
    if not isinstance(value, form):
        wanted = "a mapping" if form is dict else "a list" if form is list else "a text"
        raise InvalidArgumentError(f"{where} is {value!r}: it needs {wanted}.")


def _check_type(where: str, key: str, value: object, wanted: str) -> None:
    if wanted == _RANGE and isinstance(value, dict):
        _refuse_unknown(f"{key!r} in {where}", value, set(_BOUNDS))
        for bound, number in value.items():
            _check_type(where, f"{key}.{bound}", number, _NUMBER)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not {_NUMBER: number, _TEXT: isinstance(value, str), _RANGE: False}[wanted]:
        raise InvalidArgumentError(f"{where} has {key}={value!r}: it needs {wanted}.")


def _refuse_unknown(where: str, entry: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(entry) - known, key=str)
    if unknown:
        raise InvalidArgumentError(
            f"{where} has the unknown key {unknown[0]!r}: use one of {', '.join(sorted(known))}."
        )


def _refuse_repeats(where: str, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(f"{where} has {repeated[0]!r} twice: make the names differ.")
