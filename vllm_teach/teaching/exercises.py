"""Exercises: a stub in the lesson, a check that runs the learner's function against an oracle, and hints.

    def causal_mask(q_len, kv_len):
        raise NotImplementedError

    check.causal_mask(causal_mask)         # prints "Not solved yet: …", what differs, or "Correct: …"
    check.causal_mask.hint()               # prints the next hint

The checks themselves, one file per lesson, are in `checks/`.
"""

import copy
import dis
import functools
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.answers import difference, same

Status = Literal["solved", "unsolved", "wrong", "error"]


@dataclass(frozen=True)
class MadeAnew:
    """An argument that `make()` builds for each call of the learner's function: it has a state, such as a counter."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One call of the learner's function.

    label: the case in a few words ("q_len 3, kv_len 5"). arguments: passed by position; the learner gets a copy, or
    what a MadeAnew makes. expected: the oracle's answer. rule: what an answer that fails here has got wrong, as a
    sentence to remember.
    """

    label: str
    arguments: tuple[Any, ...]
    expected: Any
    rule: str

    def fresh_arguments(self) -> tuple[Any, ...]:
        """The arguments for one call, none of them shared with another call."""
        return tuple(one.make() if isinstance(one, MadeAnew) else copy.deepcopy(one) for one in self.arguments)

    def is_unchanged(self, given: tuple[Any, ...]) -> bool:
        """True when a call left its arguments as they were; one made anew is the call's own and may change."""
        pairs = zip(self.arguments, given, strict=True)
        return all(isinstance(before, MadeAnew) or same(before, after) for before, after in pairs)


@dataclass(frozen=True, repr=False)
class CheckResult:
    """What a check found. It is printed when made; as a cell's last value it shows nothing more."""

    name: str
    status: Status
    message: str

    @property
    def solved(self) -> bool:
        """True when every case passed."""
        return self.status == "solved"

    def __repr__(self) -> str:
        return self.message

    def _ipython_display_(self) -> None:
        """Show nothing: the check has printed its message already."""


class Check:
    """One exercise's checker; call it with the learner's function.

    cases: takes a seeded generator and yields the cases; called anew at each check, so every call sees the same inputs.
    hints: shown one by one, at each failed check or by `hint()`. rtol, atol: per-element tolerance for floats.
    """

    def __init__(
        self,
        name: str,
        lesson: str,
        task: str,
        lesson_learnt: str,
        cases: Callable[[torch.Generator], Iterator[Case]],
        hints: tuple[str, ...],
        rtol: float = 1e-9,
        atol: float = 1e-12,
    ) -> None:
        if not hints:
            raise InvalidArgumentError(f"hints of the check {name!r} is empty: give at least one.")
        self.name, self.lesson, self.task, self.lesson_learnt = name, lesson, task, lesson_learnt
        self._cases, self.hints, self._rtol, self._atol = cases, hints, rtol, atol
        self._hints_shown = 0

    def __repr__(self) -> str:
        return f"check.{self.name}(your_function): {self.task} {len(self.hints)} hints: check.{self.name}.hint()."

    def cases(self) -> list[Case]:
        """The cases, from a generator seeded by the check's name: the same on every machine."""
        return list(self._cases(torch.Generator().manual_seed(zlib.crc32(self.name.encode()))))

    def __call__(self, function: Callable[..., Any]) -> CheckResult:
        """Run every case until one fails; print and return the result.

        What `function` raises is reported and not raised again, sys.exit() included; only KeyboardInterrupt and the
        like, which a learner's hand sends, pass through.
        """
        status, text = self._judge(function)
        if status in ("wrong", "error"):
            text += "\n" + self._next_hint()
        result = CheckResult(self.name, status, text)
        print(text)
        return result

    def hint(self) -> None:
        """Print the next hint; after the last one, the last one again."""
        print(self._next_hint())

    def forget_hints(self) -> None:
        """Begin again with the first hint."""
        self._hints_shown = 0

    def _next_hint(self) -> str:
        self._hints_shown = min(self._hints_shown + 1, len(self.hints))
        return f"Hint {self._hints_shown} of {len(self.hints)}: {self.hints[self._hints_shown - 1]}"

    def _judge(self, function: Callable[..., Any]) -> tuple[Status, str]:
        if not callable(function):
            return (
                "error",
                f"Not right yet: pass the function itself, check.{self.name}(your_function), not its result.",
            )
        cases = self.cases()
        for number, case in enumerate(cases, start=1):
            where = f"case {number} of {len(cases)} ({case.label})"
            try:
                problem = self._run(function, case)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the learner's code may raise anything; the notebook must go on
                if _is_stub(error, function):
                    return "unsolved", self._unsolved()
                return "error", f"Not right yet: {where} raised {_one_line(error, function)}"
            if problem is None:
                return "unsolved", self._unsolved(" It returned None; a function without `return` does.")
            if problem:
                return "wrong", f"Not right yet: {where}\n  {problem}\n  Rule: {case.rule}"
        return "solved", f"Correct: {self.name}, {len(cases)} cases. {self.lesson_learnt}"

    def _run(self, function: Callable[..., Any], case: Case) -> str | None:
        """Return "" when right, what is wrong, or None for an answer of None or `...`."""
        given = case.fresh_arguments()
        got = function(*given)
        if got is None or got is Ellipsis:
            return None
        wrong = difference(case.expected, got, rtol=self._rtol, atol=self._atol)
        if wrong:
            return wrong
        if not case.is_unchanged(given):
            return "the answer is right, but the function changed its inputs: the caller still needs them"
        again = difference(case.expected, function(*case.fresh_arguments()), rtol=self._rtol, atol=self._atol)
        return f"a second call with the same inputs gave another answer: {again}" if again else ""

    def _unsolved(self, why: str = "") -> str:
        return f"Not solved yet: {self.task}{why} Hints: check.{self.name}.hint()"


class CheckBook:
    """All checks by name: `check.causal_mask` is a `Check`."""

    def __init__(self, checks: list[Check]) -> None:
        names = [one.name for one in checks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgumentError(f"checks holds the name {twice[0]!r} twice: rename one check.")
        self._checks = {one.name: one for one in checks}

    def __getattr__(self, name: str) -> Check:
        checks: dict[str, Check] = self.__dict__.get("_checks", {})
        if name not in checks:
            raise AttributeError(f"There is no check named {name!r}: choose one of {', '.join(sorted(checks))}.")
        return checks[name]

    def __dir__(self) -> list[str]:
        return sorted(self._checks)

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks.values())

    def __repr__(self) -> str:
        return "\n".join(f"{one.lesson}: {one!r}" for one in self)


def _is_stub(error: BaseException, function: Callable[..., Any]) -> bool:
    """True for the learner's own `raise NotImplementedError`; PyTorch raises one too, for a dtype without a kernel.

    A builtin has no frame of its own, so the innermost frame of such an error is the learner's as well: there it stands
    at a call, and in a stub at a `raise`.
    """
    trace = error.__traceback__
    if type(error) is not NotImplementedError or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_filename == _filename(function) and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _filename(function: Callable[..., Any]) -> str | None:
    """The file, or the cell, that the learner's function was written in; None for a builtin."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__  # an object that can be called
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def _message(error: BaseException) -> str:
    """The first line of what the error says; its __str__ may be the learner's, and broken."""
    try:
        lines = str(error).splitlines()
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it raises, the check goes on
        return "its message cannot be read"
    return lines[0] if lines and lines[0] else "no message"


def _one_line(error: BaseException, function: Callable[..., Any]) -> str:
    """`TypeError: … (line 3: scores = q @ k)`, the line being the last one of the learner's own code."""
    text = f"{type(error).__name__}: {_message(error)}"
    frame = _last_frame(error.__traceback__, _filename(function))
    if frame is None:
        return text
    code = f": {frame.line}" if frame.line else ""
    return f"{text} (line {frame.lineno}{code})"


def _last_frame(trace: TracebackType | None, filename: str | None) -> traceback.FrameSummary | None:
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename == filename]
    return frames[-1] if frames else None
