"""The rule that turns findings into a verdict. It is the same for all rows; what differs are a row's checks.

- *confirmed*: every part of the claim holds.
- *contradicted*: of the parts that can be decided, every one fails.
- *cannot be decided*: no part can be, and the missing datum is named.
- *partly*: all else. Some parts hold and others do not or cannot be decided, or a direction holds and not its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import FAILS, HOLDS, OPEN, Check, Undecidable
from vllm_teach.validation.audit.finding import Finding

CONFIRMED = "confirmed"
PARTLY = "partly"
CONTRADICTED = "contradicted"
UNDECIDED = "cannot be decided"
VERDICTS = (CONFIRMED, PARTLY, CONTRADICTED, UNDECIDED)


@dataclass(frozen=True)
class Judgement:
    """What became of one part of a claim: the check, the finding it looked at, and the outcome."""

    check: Check | Undecidable
    finding: Finding | None
    outcome: str

    @property
    def text(self) -> str:
        """One sentence: the part, the number, what is accepted, and why."""
        check = self.check
        if isinstance(check, Undecidable):
            return f"{check.part}: {OPEN}, {check.missing} is missing"
        if self.finding is None:
            return f"{check.part}: {OPEN}, {check.finding} was not found here"
        return f"{check.part}: {self.outcome}, {self.finding.text} ({check.accepted} would hold: {check.why})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a row, one of VERDICTS, and the judgements it follows from."""

    verdict: str
    judgements: tuple[Judgement, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What keeps open parts from being decided."""
        return tuple(
            each.check.missing if isinstance(each.check, Undecidable) else each.check.finding
            for each in self.judgements
            if each.outcome == OPEN
        )


def judge(checks: Sequence[Check | Undecidable], findings: Iterable[Finding]) -> Verdict:
    """Return what the findings say of a claim, by the rule above.

    Raises InvalidArgumentError for no checks, and when two findings have the same name.
    """
    if not checks:
        raise InvalidArgumentError("checks is empty, so that nothing could follow from any finding: give one.")
    by_name: dict[str, Finding] = {}
    for finding in findings:
        if finding.name in by_name:
            raise InvalidArgumentError(f"findings has {finding.name!r} twice: make the names differ.")
        by_name[finding.name] = finding
    judgements = tuple(
        Judgement(check, None, OPEN)
        if isinstance(check, Undecidable)
        else Judgement(check, by_name.get(check.finding), check.outcome(by_name.get(check.finding)))
        for check in checks
        if isinstance(check, Undecidable) or not (check.optional and check.finding not in by_name)
    )
    return Verdict(_combine([each.outcome for each in judgements]), judgements)


def _combine(outcomes: Sequence[str]) -> str:
    decided = {outcome for outcome in outcomes if outcome != OPEN}
    if not decided:
        return UNDECIDED
    if decided == {FAILS}:
        return CONTRADICTED
    return CONFIRMED if decided == {HOLDS} and OPEN not in outcomes else PARTLY
