"""A number that stands beside a claim: what it is of, how it was come by, its spread, and in which setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing

MEASURED = "measured here"
COUNTED = "counted here"
READ = "read from a result file"
MODELLED = "modelled"
ARITHMETIC = "arithmetic"
DOCUMENTED = "documented"
HOW = (MEASURED, COUNTED, READ, MODELLED, ARITHMETIC, DOCUMENTED)
FOUND = (MEASURED, COUNTED, READ)
"""Ways that touch a machine or run our code; the others reason from sizes, data sheets and documentation."""
_FEWEST_SAMPLES = 5  # of a clock, below which there is no spread to speak of


@dataclass(frozen=True)
class Finding:
    """One number. `name` is unique within its row: checks refer to it.

    `how` is one of HOW: by a clock here; by an exact count of what ran here; from a committed result file; by a model
    of a device that is not here; by arithmetic on what was published; or from documentation. `setting` says in words
    what it holds for, and for what was read or documented also where. `low` and `high` are the lowest and the highest
    of `samples` values of which `value` is the median; without a spread they are the value.

    Raises InvalidArgumentError for another `how`, for what is no finite number, for a value outside its spread, and for
    a measurement of fewer than five samples.
    """

    name: str
    value: float
    unit: str
    how: str
    setting: str
    low: float
    high: float
    samples: int = 1

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise InvalidArgumentError(f"how={self.how!r} is no way to come by a number: use one of {', '.join(HOW)}.")
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise InvalidArgumentError(f"value={self.value!r} of {self.name!r} is not finite: leave the finding out.")
        if not self.low <= self.value <= self.high:
            raise InvalidArgumentError(
                f"value={self.value!r} of {self.name!r} lies outside {self.low!r} to {self.high!r}: give its spread."
            )
        if self.how == MEASURED and self.samples < _FEWEST_SAMPLES:
            raise InvalidArgumentError(
                f"samples={self.samples} of {self.name!r} are too few for a clock: use {_FEWEST_SAMPLES} at least."
            )

    @property
    def text(self) -> str:
        """The number as it is printed, with its unit and its spread: "4.2 x (3.9 to 4.6)"."""
        shown = f"{number(self.value)} {self.unit}".rstrip()
        return f"{shown} ({number(self.low)} to {number(self.high)})" if self.low < self.high else shown


def measured(name: str, timing: Timing, unit: str, setting: str, scale: float = 1.0) -> Finding:
    """Return what a clock said, times `scale`: the median of its samples with the lowest and the highest."""
    ends = sorted((timing.low * scale, timing.high * scale))
    return Finding(name, timing.median * scale, unit, MEASURED, setting, ends[0], ends[1], len(timing.samples))


def counted(name: str, value: float, unit: str, setting: str) -> Finding:
    """Return an exact count of what ran here, the same in every run."""
    return Finding(name, value, unit, COUNTED, setting, value, value)


def read(name: str, value: float, unit: str, setting: str) -> Finding:
    """Return a number out of a committed result file, which `setting` names with its device and command."""
    return Finding(name, value, unit, READ, setting, value, value)


def modelled(name: str, value: float, unit: str, setting: str) -> Finding:
    """Return a number for a device that is not here; `setting` names the device and what is assumed."""
    return Finding(name, value, unit, MODELLED, setting, value, value)


def arithmetic(name: str, value: float, unit: str, setting: str) -> Finding:
    """Return a number that follows from sizes or from the published figures alone; `setting` is the sum."""
    return Finding(name, value, unit, ARITHMETIC, setting, value, value)


def documented(name: str, value: float, unit: str, setting: str) -> Finding:
    """Return a number that a document states; `setting` names the document."""
    return Finding(name, value, unit, DOCUMENTED, setting, value, value)


def number(value: float) -> str:
    """Return a number with three significant digits, or all before the point if there are more."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.3g}"
