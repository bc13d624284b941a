"""Set what was measured beside what was claimed, row by row. A claim is printed as published, never adjusted."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.tables import Row, Table, get_table

NOT_MEASURED = "not measured in this lesson"
# Where a number can come from: a clock or an allocator, an exact counter, or arithmetic on sizes.
HOW = ("measured here", "counted here", "computed")
_WIDTHS = (40, 28, 30)
# Units as the keys spell them, longest first, and as they are printed.
_UNITS = {
    "_tokens_per_s": "tokens/s",
    "_ms_per_token": "ms/token",
    "_gb_s": "GB/s",
    "_percent": "%",
    "_ms": "ms",
    "_mb": "MB",
    "_gb": "GB",
}
# Values in the unit that the metric's name ends with; ratios and reductions have none.
_SAME_UNIT = {"value": "", "baseline": "baseline ", "optimised": "optimised "}
_SIGNS = {"above": ">", "below": "<", "at_least": ">=", "at_most": "<="}


@dataclass(frozen=True)
class Measured:
    """One number (or a text, or several named numbers) that stands beside a claim.

    `unit` stands behind each number; `how` is one of HOW; `note` says what differs from the claim's setting. Raises
    InvalidArgumentError for another `how` and for a value that is no finite number: what was not measured is left out.
    """

    value: float | str | Mapping[str, float]
    unit: str = ""
    how: str = "measured here"
    note: str = ""

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise InvalidArgumentError(f"how={self.how!r} is no way to come by a number: use one of {', '.join(HOW)}.")
        if isinstance(self.value, str):
            return
        for number in self.value.values() if isinstance(self.value, Mapping) else [self.value]:
            if isinstance(number, bool) or not isinstance(number, Real) or not _is_finite(number):
                raise InvalidArgumentError(
                    f"value={_shown(self.value)} is no finite number: use finite numbers or a text, "
                    "or leave the row out."
                )

    @property
    def text(self) -> str:
        """The value as printed: the unit behind it, and how it was found, unless measured.

        A number below 100 has three significant digits, and a larger or whole one all digits before the point.
        """
        if isinstance(self.value, Mapping):
            shown = ", ".join(f"{_words(name)} {self._with_unit(number)}" for name, number in self.value.items())
        else:
            shown = self._with_unit(self.value)
        return shown if self.how == "measured here" else f"{shown} ({self.how.removesuffix(' here')})"

    def _with_unit(self, value: float | str) -> str:
        shown = value if isinstance(value, str) else _number(value)
        return f"{shown} {self.unit}" if self.unit else shown


@dataclass(frozen=True, repr=False)
class Comparison:
    """A reference table with this lesson's numbers: (row, number or None) in the table's order, and the device."""

    table: Table
    rows: tuple[tuple[Row, Measured | None], ...]
    device: str

    def __repr__(self) -> str:
        done = sum(found is not None for _, found in self.rows)
        return f"<Comparison {self.table.id}: {done} of {len(self.rows)} rows measured on {self.device}>"

    def __str__(self) -> str:
        lines = [*_heading(self.table), *_field("measured on", self.device), ""]
        lines += _line(("claim", "measured here", "note"))
        lines.append("-+-".join("-" * width for width in _WIDTHS))
        for row, found in self.rows:
            lines += _line((claim(row), found.text if found else NOT_MEASURED, found.note if found else ""))
        return "\n".join([*lines, *_caveat(self.table)])


def compare(table_id: str, measured: Mapping[str, Measured], device: str = "cpu") -> Comparison:
    """Print a reference table with the numbers of this lesson beside it, and return it as data.

    `measured` maps row keys to numbers; rows without one are shown as not measured. A number without a unit gets that
    of its row. `device` says what the numbers were measured on: "cpu" and "cuda" are printed as this machine's
    processor or GPU, any other text as it is. Raises InvalidArgumentError for an unknown table or row (naming those
    that exist), a bare number, a unit that is not the row's, and "cuda" where there is none. Clocks differ from run to
    run: a notebook calls this in a cell tagged `nbval-ignore-output`, and prints `claims(table_id)` in a compared one.
    """
    table = get_table(table_id)
    if not isinstance(measured, Mapping):
        raise InvalidArgumentError(f"measured={measured!r} is no mapping: use {{row key: Measured(...)}}.")
    fitted = {key: _fitted(table.row(key), found) for key, found in measured.items()}
    if device in ("cpu", "cuda"):
        from vllm_teach.performance.machine import device_label

        device = device_label(device)
    comparison = Comparison(table, tuple((row, fitted.get(row.key)) for row in table.rows), device)
    print(comparison)
    return comparison


def _fitted(row: Row, found: Measured) -> Measured:
    """The number with its row's unit. Rows of other kinds than "metric" have no unit, or several, and take any."""
    if not isinstance(found, Measured):
        raise InvalidArgumentError(f"measured[{row.key!r}]={found!r} is no Measured: write Measured({found!r}).")
    if row.kind != "metric" or isinstance(found.value, str):
        return found
    unit = _unit(row.name)[1].strip()
    if found.unit not in ("", unit):
        wanted = repr(unit) if unit else "none"
        raise InvalidArgumentError(
            f"unit={found.unit!r} is not that of the row {row.key!r}: convert, and use {wanted}."
        )
    return found if found.unit == unit else replace(found, unit=unit)


def claims(table_id: str, *, caveat: bool = True) -> str:
    """Return a reference table as text, the claims alone: the same on every machine.

    `caveat=False` leaves the caveat out, for a lesson that prints it elsewhere. Raises InvalidArgumentError for an
    unknown table, naming those that exist.
    """
    table = get_table(table_id)
    width = sum(_WIDTHS)
    lines = [
        line
        for row in table.rows
        for line in textwrap.wrap(claim(row), width, initial_indent="- ", subsequent_indent="  ")
    ]
    return "\n".join([*_heading(table), "", *lines, *(_caveat(table) if caveat else [])])


def claim(row: Row) -> str:
    """Return one claim as a line of text, with the published numbers as they are."""
    values = dict(row.values)
    name, unit = _unit(row.name) if row.kind == "metric" else (row.name, "")
    if row.kind == "mode":
        name = _words(name)
    if row.kind in ("symptom", "scenario"):
        return f"{name} ({'; '.join(f'{key}: {text}' for key, text in values.items())})"
    if "seq_len" in values:
        name += f" at {values.pop('seq_len'):,} tokens"
    return ": ".join(part for part in (name, _claimed(values, unit)) if part)


def _claimed(values: dict[str, Any], unit: str) -> str:
    parts = []
    if "low" in values and "high" in values:
        parts.append(f"{values.pop('low')} to {values.pop('high')}{unit}")
    for key, value in values.items():
        if key in _SIGNS:
            parts.append(f"{_SIGNS[key]} {value}{unit}")
        elif key in _SAME_UNIT:
            parts.append(f"{_SAME_UNIT[key]}{value}{unit}")
        else:
            words, own_unit = _unit(key)
            parts.append(
                f"{words} {_claimed(dict(value), own_unit) if isinstance(value, dict) else f'{value}{own_unit}'}"
            )
    return ", ".join(parts)


def _unit(name: str) -> tuple[str, str]:
    """Split the unit off a name: "memory_mb" -> ("memory", " MB")."""
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return _words(name.removesuffix(ending)), f" {unit}"
    return _words(name), ""


def _heading(table: Table) -> list[str]:
    place = f"article {table.article}, section {table.section}" if table.section else f"article {table.article}"
    lines = textwrap.wrap(f"{table.id} ({place})", sum(_WIDTHS))
    workload = ", ".join(f"{_words(key)} {value}" for key, value in table.workload.items())
    tiles = ", ".join(f"{gpu.upper()} {' x '.join(map(str, sizes))}" for gpu, sizes in table.tiles.items())
    where = _field("claimed on", table.hardware or "not given")
    return [*lines, *where, *_field("workload", workload), *_field("tiles", tiles)]


def _caveat(table: Table) -> list[str]:
    return ["", *_field("caveat", table.caveat)] if table.caveat else []


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", sum(_WIDTHS), subsequent_indent="  ") if text else []


def _line(cells: tuple[str, str, str]) -> list[str]:
    """One row of the table, as many lines as its longest cell needs."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)]
    height = max(map(len, wrapped))
    padded = [
        [f"{part:<{width}}" for part in cell + [""] * (height - len(cell))]
        for cell, width in zip(wrapped, _WIDTHS, strict=True)
    ]
    return [" | ".join(parts).rstrip() for parts in zip(*padded, strict=True)]


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a whole number too long to print"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
