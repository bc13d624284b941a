"""The result as a table of plain text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm_teach.validation.equivalence.agreement import Agreement
from vllm_teach.validation.equivalence.check import Outcome
from vllm_teach.validation.equivalence.configurations import Configuration

HEAD = f"{'':>3} {Configuration.HEAD}{'equal tokens':>16}{'excused':>9}{'preempted':>11}{'hits':>8}{'seconds':>9}"


def format_outcome(number: int, outcome: Outcome) -> str:
    """Return one line, and below it what is wrong or excused."""
    if outcome.agreement is None:
        equal = f"{outcome.num_tokens - len(outcome.differences)}/{outcome.num_tokens}"
    else:
        equal = f"{outcome.agreement.same}/{outcome.num_tokens}"
    line = (
        f"{number:>3} {outcome.configuration}{equal:>16}{outcome.num_excused:>9}"
        f"{sum(outcome.preemptions.values()):>11}{outcome.hit_tokens:>8}{outcome.seconds:>9.1f}"
    )
    notes = [*map(str, outcome.differences), *(f"WRONG: {fault}" for fault in outcome.faults)]
    if outcome.agreement is not None and outcome.rival is not None:
        notes += [_format_agreement("ours", outcome.agreement), _format_agreement("transformers", outcome.rival)]
    return "\n".join([line, *(f"      {note}" for note in notes)])


def _format_agreement(name: str, agreement: Agreement) -> str:
    return (
        f"{name:<13} agrees with transformers in float32 on {agreement.share:.2%} of the tokens; log-probabilities "
        f"{agreement.mean_error:.4f} off on average, {agreement.max_error:.3f} at most"
    )


def format_summary(outcomes: Sequence[Outcome]) -> str:
    """Return the last line: how many passed, and all tokens together."""
    tokens = sum(each.num_tokens for each in outcomes)
    excused = sum(each.num_excused for each in outcomes)
    wrong = sum(len(each.differences) for each in outcomes) - excused
    passed = sum(each.passed for each in outcomes)
    return f"{passed} of {len(outcomes)} configurations passed: {tokens:,} tokens, {excused} excused, {wrong} wrong"


def to_json(outcomes: Sequence[Outcome], **about: Any) -> dict[str, Any]:
    """Return the result as what `json.dump` takes, with what it is `about`: model, dtype, command, environment."""
    rows = [asdict(each) | {"passed": each.passed, "excused": each.num_excused} for each in outcomes]
    return {**about, "passed": all(each.passed for each in outcomes), "configurations": rows}
