"""Which values of a finding confirm a claim, as data: a range with its reason, or a part that nothing can decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.finding import Finding, number
from vllm_teach.validation.tables import get_table

HOLDS = "holds"
DIRECTION = "direction only"
FAILS = "fails"
OPEN = "open"
LAYERS = (12, 96)
"""Of the published language models, from GPT-2 to GPT-3."""
_SOME_EFFECT = 0.05
"""Of the way from no effect to the claimed range: below that a finding has no direction to speak of."""


@dataclass(frozen=True)
class Check:
    """A part of a claim and the values of the finding `finding` that confirm it: `low` to `high`, both included.

    `why` says why the range is what it is. `neutral` is the value that would mean "no effect", None where there is
    none: a finding outside the range but on the range's side of `neutral`, with its whole spread, has the claimed
    direction and not the claimed size; one whose spread reaches over `neutral` shows no effect, wherever its median
    lies. With `by_spread` a finding holds when its spread reaches into the range: for a
    claim that leaves open which of several measures it means. An `optional` check does not count where its finding is
    missing, as those that only one kind of device can make.

    Raises InvalidArgumentError for an empty range, a check without a reason, and a `neutral` within the range.
    """

    part: str
    finding: str
    low: float
    high: float
    why: str
    neutral: float | None = None
    optional: bool = False
    by_spread: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise InvalidArgumentError(f"low={self.low!r} is above high={self.high!r} in {self.part!r}: swap them.")
        if not self.why.strip():
            raise InvalidArgumentError(f"why of {self.part!r} is empty: say why this range and no other.")
        if self.neutral is not None and self.low < self.neutral < self.high:
            raise InvalidArgumentError(
                f"neutral={self.neutral!r} lies within {self.accepted} of {self.part!r}: then it decides nothing."
            )

    @property
    def accepted(self) -> str:
        """The range in words: "1.5 to 6", "at least 0.6", "at most 4"; "more than 1" where 1 would mean no effect."""
        if math.isinf(self.low):
            return f"{'less than' if self.high == self.neutral else 'at most'} {number(self.high)}"
        if math.isinf(self.high):
            return f"{'more than' if self.low == self.neutral else 'at least'} {number(self.low)}"
        return f"{number(self.low)} to {number(self.high)}" if self.low < self.high else f"exactly {number(self.low)}"

    def outcome(self, finding: Finding | None) -> str:
        """Return HOLDS, DIRECTION or FAILS by the finding's median and its spread; OPEN without a finding."""
        if finding is None:
            return OPEN
        low, high = (finding.low, finding.high) if self.by_spread else (finding.value, finding.value)
        inside = low <= self.high and high >= self.low
        if self.neutral is None or self.by_spread:
            return HOLDS if inside else DIRECTION if self._points_right(finding) else FAILS
        if not self._points_right(finding):
            return FAILS
        return HOLDS if inside else DIRECTION

    def _points_right(self, finding: Finding) -> bool:
        """Whether the finding lies clearly, and with its whole spread, on the range's side of `neutral`."""
        if self.neutral is None:
            return False
        above = self.low >= self.neutral
        least = self.neutral + _SOME_EFFECT * ((self.low if above else self.high) - self.neutral)
        if above:
            return finding.value >= least and finding.low > self.neutral
        return finding.value <= least and finding.high < self.neutral


@dataclass(frozen=True)
class Undecidable:
    """A part of a claim that no experiment can decide, because the datum `missing` was not published."""

    part: str
    missing: str


def near(
    part: str,
    finding: str,
    claimed: float,
    within: float,
    why: str,
    neutral: float | None = 1.0,
    optional: bool = False,
) -> Check:
    """Return the check that accepts `claimed` within a factor: `claimed` / `within` to `claimed` · `within`.

    `neutral` is 1 by default, for ratios. Towards it the range ends at the latest half way, by logarithm: a ratio of
    1.2 is no confirmation of one of 1.9, whatever the factor.
    """
    if not (claimed > 0 and within >= 1):
        raise InvalidArgumentError(
            f"claimed={claimed!r}, within={within!r} is no tolerance: use a number above 0 and a factor from 1."
        )
    low, high = claimed / within, claimed * within
    if neutral is not None:
        half = math.sqrt(claimed * neutral)
        low, high = (max(low, half), high) if claimed > neutral else (low, min(high, half))
    return Check(part, finding, low, high, why, neutral, optional)


def whole_model(part: str, finding: str) -> Check:
    """Return the check of a published time by how many layers it would be of, on the device it was published for.

    Batch and layers are not published, so a time can only be impossible: of fewer or more layers than models have.
    """
    why = "the layers that published language models have; only on an A100"
    return Check(part, finding, *LAYERS, why, optional=True)


def between(
    part: str, finding: str, low: float, high: float, why: str, within: float = 1.0, neutral: float | None = 1.0
) -> Check:
    """Return the check that accepts a published range, made wider by the factor `within` on both sides."""
    return Check(part, finding, low / within, high * within, why, neutral)


def at_least(part: str, finding: str, limit: float, why: str, neutral: float | None = None) -> Check:
    """Return the check that accepts `limit` and all above it."""
    return Check(part, finding, limit, math.inf, why, neutral)


def at_most(part: str, finding: str, limit: float, why: str, neutral: float | None = None) -> Check:
    """Return the check that accepts `limit` and all below it."""
    return Check(part, finding, -math.inf, limit, why, neutral)


def published(table_id: str) -> Callable[[str, str], float]:
    """Return the function that looks a number of this table up, by row and name, so that none is written twice.

    Raises InvalidArgumentError for what the table does not have.
    """
    table = get_table(table_id)

    def look_up(key: str, name: str) -> float:
        values = table.row(key).values
        if not isinstance(values.get(name), int | float):
            raise InvalidArgumentError(f"name={name!r} is no number of the row {key!r} in {table_id!r}: see the table.")
        return float(values[name])

    return look_up
