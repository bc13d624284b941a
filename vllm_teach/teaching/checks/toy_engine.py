"""A toy engine that runs a learner's scheduler, step by step, and says what is wrong with its plans."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_teach.teaching.exercises import Case, Check

Plan = dict[str, int]
Line = list[tuple[str, int]]


@dataclass
class Toy:
    """One sequence of the toy engine: `missing` tokens until the next one is drawn, `left` to be drawn."""

    name: str
    missing: int
    left: int


@dataclass
class Run:
    """A simulation of `schedule` on some requests; `problem` is what went wrong, in one line."""

    budget: int
    places: int
    waiting: list[Toy]
    running: list[Toy] = field(default_factory=list)
    step: int = 0

    def advance(self, schedule: Callable[..., Any]) -> str | None:
        """Make one step. Returns "" if it is right, else what is wrong; None if there was no answer."""
        self.step += 1
        running, waiting = _line(self.running), _line(self.waiting)
        given = copy.deepcopy((running, waiting))
        plan = schedule(*given, self.budget, self.places)
        if plan is None or plan is Ellipsis:
            return None
        if given != (running, waiting):
            return f"step {self.step}: the function changed its inputs: the engine still needs them"
        problem = _problem(plan, running, waiting, self.budget, self.places)
        if problem:
            return f"step {self.step}, running {running}, waiting {waiting[:4]}: {problem}"
        if schedule(*copy.deepcopy((running, waiting)), self.budget, self.places) != plan:
            return f"step {self.step}: a second call with the same inputs gave another plan"
        self._compute(plan)
        return ""

    def _compute(self, plan: Plan) -> None:
        self.running += [toy for toy in self.waiting if toy.name in plan]
        self.waiting = [toy for toy in self.waiting if toy.name not in plan]
        for toy in self.running:
            toy.missing -= plan[toy.name]
            if not toy.missing:
                toy.missing, toy.left = 1, toy.left - 1
        self.running = [toy for toy in self.running if toy.left]


def _line(toys: list[Toy]) -> Line:
    return [(toy.name, toy.missing) for toy in toys]


def _problem(plan: Any, running: Line, waiting: Line, budget: int, places: int) -> str:
    """What is wrong with a plan, or "": the rules leave one plan for each state."""
    if not isinstance(plan, dict):
        return f"expected a dict from name to tokens, got {type(plan).__name__}"
    missing = dict(running) | dict(waiting)
    for name, tokens in plan.items():
        if name not in missing:
            return f"{name!r} neither runs nor waits"
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            return f"{name!r} gets {tokens!r}: leave out who gets nothing, and use whole numbers"
        if tokens > missing[name]:
            return f"{name!r} gets {tokens} tokens and lacks only {missing[name]}"
    if sum(plan.values()) > budget:
        return f"the plan has {sum(plan.values())} tokens, and the budget is {budget}"
    skipped = next((name for name, _ in running if name not in plan), None)
    if skipped is not None:
        return f"{skipped!r} runs and gets nothing: its user waits for the next token"
    admitted = [name in plan for name, _ in waiting]
    if len(running) + sum(admitted) > places:
        return f"{len(running) + sum(admitted)} sequences would run in {places} places"
    if admitted != sorted(admitted, reverse=True):
        return "somebody who waits was overtaken by one behind"
    return _unfair(plan, running, waiting, admitted) or _idle(plan, running, waiting, admitted, budget, places)


def _unfair(plan: Plan, running: Line, waiting: Line, admitted: list[bool]) -> str:
    taking = running + [each for each, takes in zip(waiting, admitted, strict=True) if takes]
    short = next((place for place, (name, missing) in enumerate(taking) if plan[name] < missing), None)
    if short is None:
        return ""
    name = taking[short][0]
    for place, (other, _) in enumerate(taking[short + 1 :], start=short + 1):
        if place >= len(running) or plan[other] > 1:
            return f"{name!r} comes first and lacks tokens that {other!r} got"
    return ""


def _idle(plan: Plan, running: Line, waiting: Line, admitted: list[bool], budget: int, places: int) -> str:
    if sum(plan.values()) == budget:
        return ""
    lacking = next((n for n, missing in running + waiting if n in plan and plan[n] < missing), None)
    left = budget - sum(plan.values())
    if lacking is not None:
        return f"{left} tokens of the budget are left, and {lacking!r} lacks some"
    if len(running) + sum(admitted) < places and not all(admitted):
        return f"{left} tokens and a place are left, and {waiting[sum(admitted)][0]!r} waits"
    return ""


class EngineCheck(Check):
    """Runs the learner's function as the scheduler of a toy engine: each case is a simulation."""

    def _run(self, function: Callable[..., Any], case: Case) -> str | None:
        requests, budget, places, running = case.arguments
        toys = [Toy(chr(ord("A") + i), prompt, output) for i, (prompt, output) in enumerate(requests)]
        run = Run(budget, places, toys[running:], toys[:running])
        while run.waiting or run.running:
            problem = run.advance(function)
            if problem is None or problem:
                return problem
        if run.step != case.expected:
            return f"the requests took {run.step} steps; {case.expected} are enough"
        return ""


def count_steps(requests: list[tuple[int, int]], budget: int, places: int, started: int) -> int:
    """Steps that the requests take, of which the first `started` run already."""
    waiting = [[prompt, output] for prompt, output in requests]
    running, waiting = waiting[:started], waiting[started:]
    steps = 0
    while waiting or running:
        steps += 1
        got = [1] * len(running)
        left = budget - len(running)
        for place, each in enumerate(running):
            more = min(left, each[0] - 1)
            got[place] += more
            left -= more
        while left and waiting and len(running) < places:
            running.append(waiting.pop(0))
            got.append(min(left, running[-1][0]))
            left -= got[-1]
        for each, tokens in zip(running, got, strict=True):
            each[0] -= tokens
            if not each[0]:
                each[:] = [1, each[1] - 1]
        running = [each for each in running if each[1]]
    return steps
