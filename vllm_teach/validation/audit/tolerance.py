"""How much of an audit hangs on its tolerances: the same findings, judged by wider and by narrower ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import Check, Undecidable
from vllm_teach.validation.audit.finding import MEASURED
from vllm_teach.validation.audit.run import RowAudit
from vllm_teach.validation.audit.verdict import VERDICTS, Verdict, judge


@dataclass(frozen=True)
class ToleranceSweep:
    """How many of `num_rows` rows have each verdict, `counts[verdict]`, at each of `factors`."""

    factors: tuple[float, ...]
    counts: dict[str, tuple[int, ...]]

    @property
    def num_rows(self) -> int:
        """Rows that were judged, the same at every factor."""
        return sum(column[0] for column in self.counts.values())


def rests_on_a_clock(row: RowAudit) -> bool:
    """Say whether a clock of the run decides a part of the row; a count, a model or a sum is the same in every run."""
    return any(each.finding is not None and each.finding.how == MEASURED for each in row.verdict.judgements)


def stretched(check: Check, factor: float) -> Check:
    """Return `check` with a range that reaches `factor` times further on both sides; below 1 it is narrower.

    A bound, whose range is open on one side, and an exact value are no tolerances and stay as they are. Towards
    `neutral` the range ends at the latest half way, by logarithm, as that of `check.near`; a narrow one that would be
    empty becomes its middle. Raises InvalidArgumentError for a factor that is not above 0.
    """
    if not factor > 0:
        raise InvalidArgumentError(f"factor={factor!r} stretches nothing: use a number above 0.")
    if not 0 < check.low < check.high < math.inf:
        return check
    low, high = check.low / factor, check.high * factor
    if low > high:
        low = high = math.sqrt(check.low * check.high)
    if check.neutral and factor > 1:
        if check.low >= check.neutral:
            low = max(low, min(check.low, math.sqrt(check.low * check.neutral)))
        else:
            high = min(high, max(check.high, math.sqrt(check.high * check.neutral)))
    return replace(check, low=low, high=high)


def judge_stretched(row: RowAudit, factor: float) -> Verdict:
    """Return the verdict that the row's findings would have under stretched ranges."""
    checks = [each if isinstance(each, Undecidable) else stretched(each, factor) for each in row.experiment.checks]
    return judge(checks, row.findings)


def sweep_tolerance(rows: Iterable[RowAudit], factors: Iterable[float]) -> ToleranceSweep:
    """Judge `rows` at each factor. Raises InvalidArgumentError for no rows or no factors."""
    rows, factors = tuple(rows), tuple(factors)
    if not rows or not factors:
        raise InvalidArgumentError(f"there are {len(rows)} rows and {len(factors)} factors: give one of each at least.")
    found = [[judge_stretched(row, factor).verdict for row in rows] for factor in factors]
    return ToleranceSweep(factors, {name: tuple(each.count(name) for each in found) for name in VERDICTS})
