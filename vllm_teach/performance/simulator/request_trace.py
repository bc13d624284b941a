"""Requests from a CSV file, as production systems publish them: a time and two lengths a row, and no text.

The columns are those of the Azure LLM inference traces (Patel et al. 2024, "Splitwise", section 3): TIMESTAMP,
ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.simulator.traffic import Traffic, mean_lengths
from vllm_teach.performance.virtual_time import Arrival

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_request_trace(path: str | Path, num_requests: int | None = None) -> Traffic:
    """Return the requests of a CSV file, the first `num_requests` of them or all; the first one comes at 0 seconds.

    A header names the columns, in any case and order; others are passed over. Times ascend; they are numbers of seconds
    or dates as ISO 8601 writes them. Raises InvalidArgumentError for a file that cannot be read or has no request, for
    columns that are missing (it lists those found), and for the first row with a time or a length that is none.
    """
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            arrivals = tuple(islice(_read(file, lines), num_requests))
    except (OSError, UnicodeError, csv.Error) as error:
        raise InvalidArgumentError(f"path={str(path)!r} cannot be read ({error}): give a CSV file in UTF-8.") from error
    if not arrivals:
        raise InvalidArgumentError(f"path={str(path)!r} has no requests: give a trace with a row for each.")
    told = mean_lengths([(each.prompt_len, each.output_len) for each in arrivals])
    return Traffic(arrivals, told, f"at the times of {file.name}, over {arrivals[-1].time:,.0f} s")


def _read(file: Path, lines: TextIO) -> Iterator[Arrival]:
    rows = csv.reader(lines)
    places = _find_columns(file, next(rows, []))
    seconds: Callable[[str], float] | None = None
    first = last = 0.0
    for cells in rows:
        if not any(cells):
            continue  # a blank line
        where = f"{file.name}, line {rows.line_num}"
        if len(cells) <= max(places):
            raise InvalidArgumentError(f"{where} has {len(cells)} cells: give each row all of {', '.join(COLUMNS)}.")
        time_cell, prompt_cell, output_cell = (cells[place].strip() for place in places)
        if seconds is None:  # the first row says how times are written
            seconds = _number if _is_number(time_cell) else _date
            first = last = _time(where, seconds, time_cell)
        time = _time(where, seconds, time_cell)
        if time < last:
            raise InvalidArgumentError(
                f"{where}: TIMESTAMP={time_cell!r} is before the row above: sort the file by time."
            )
        last = time
        yield Arrival(_length(where, COLUMNS[1], prompt_cell), _length(where, COLUMNS[2], output_cell), time - first)


def _find_columns(file: Path, header: Iterable[str]) -> list[int]:
    found = [name.strip() for name in header]
    names = [name.lower() for name in found]
    missing = [name for name in COLUMNS if name.lower() not in names]
    if missing:
        has = f"has the columns {', '.join(found)}" if found else "is empty"
        raise InvalidArgumentError(
            f"{file.name} {has}: a trace needs {', '.join(COLUMNS)}, so add {', '.join(missing)}."
        )
    return [names.index(name.lower()) for name in COLUMNS]


def _time(where: str, seconds: Callable[[str], float], text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        kind = "number of seconds" if seconds is _number else "date, as 2023-11-16 18:17:03.98"
        raise InvalidArgumentError(f"{where}: TIMESTAMP={text!r} is no time: give a {kind}.") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _date(text: str) -> float:
    moment = datetime.fromisoformat(text)
    # Without a zone it is taken for UTC, whose days all have 24 hours.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _length(where: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
        raise InvalidArgumentError(f"{where}: {name}={text!r:.40} is no length: give a whole number from 1.")
    return int(text)
