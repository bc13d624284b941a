"""Checks of lesson 08: tokens under a budget, who is preempted, recompute or swap, and a scheduler of ten lines."""

import math
from collections.abc import Iterator

import torch

from vllm_teach.teaching.checks.toy_engine import EngineCheck, count_steps
from vllm_teach.teaching.exercises import Case, Check

LESSON = "08_scheduling"


def _random(generator: torch.Generator, low: int, high: int, count: int) -> list[int]:
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def _handed_out(budget: int, missing: list[int], threshold: int) -> list[int]:
    """One token each, then one after the other to the first that may have more, until none is left."""
    caps = [min(tokens, threshold or tokens) for tokens in missing]
    given = [1] * len(missing)
    for _ in range(budget - len(missing)):
        first = next((i for i, cap in enumerate(caps) if given[i] < cap), None)
        if first is None:
            break
        given[first] += 1
    return given


def _budget_cases(generator: torch.Generator) -> Iterator[Case]:
    settings: list[tuple[str, str, int, list[int], int]] = [
        ("decodes alone", "Who decodes lacks one token, and gets it.", 8, [1, 1, 1], 0),
        ("a prompt behind decodes", "A prompt gets what the others leave of the budget.", 8, [1, 1, 20], 0),
        ("a prompt before decodes", "What is owed to those behind is not for the prompt.", 8, [20, 1, 1], 0),
        ("two prompts", "The first prompt takes what it can; the second still gets its one token.", 8, [20, 20], 0),
        ("a short prompt first", "What the first does not need goes to the next.", 10, [4, 20, 1], 0),
        ("more budget than work", "Nobody computes more tokens than it lacks.", 64, [5, 1, 7], 0),
        ("a budget of one each", "With one token each, all advance by one.", 3, [9, 9, 9], 0),
        (
            "a threshold",
            "No prompt gets more than the threshold in a step, even if the budget has more.",
            32,
            [40, 40],
            8,
        ),
        ("a threshold above", "A threshold above what is missing changes nothing.", 32, [5, 40, 1], 16),
    ]
    for number in range(4):
        missing = _random(generator, 1, 30, 5)
        budget = _random(generator, 5, 50, 1)[0]
        threshold = 0 if number % 2 else _random(generator, 2, 12, 1)[0]
        settings.append((f"drawn {number + 1}", "In order, one token owed to each behind.", budget, missing, threshold))
    for label, rule, budget, missing, threshold in settings:
        text = f"{label}: budget {budget}, missing {missing}, threshold {threshold}"
        yield Case(text, (budget, missing, threshold), tuple(_handed_out(budget, missing, threshold)), rule)


def _lost(running: list[tuple[int, int, int]], needed: int, policy: str) -> tuple[int, ...]:
    """Try the least important first: nobody that is left comes behind one that was taken."""
    left, taken, freed = list(range(len(running))), [], 0
    while freed < needed:
        last = left[0]
        for index in left:
            arrival, priority, _ = running[index]
            worst_arrival, worst_priority, _ = running[last]
            behind = (priority, arrival) > (worst_priority, worst_arrival) if policy == "priority" else False
            behind = arrival > worst_arrival if policy == "fcfs" else behind
            last = index if behind else last
        left.remove(last)
        taken.append(last)
        freed += running[last][2]
    return tuple(taken)


def _victim_cases(generator: torch.Generator) -> Iterator[Case]:
    three = [(4, 0, 2), (9, 0, 3), (6, 0, 5)]
    ranks = [(4, 2, 2), (9, 0, 3), (6, 1, 5), (7, 2, 1)]
    settings = [
        ("one is enough", "Under fcfs the last that arrived gives its blocks up first.", three, 3, "fcfs"),
        ("one block short", "If the first victim's blocks are too few, the next last follows.", three, 4, "fcfs"),
        ("exactly enough", "As soon as enough blocks are free, nobody else is preempted.", three, 8, "fcfs"),
        ("nothing needed", "If no block is needed, nobody is preempted: an empty list.", three, 0, "fcfs"),
        ("priority", "Under priority the largest number goes first, of equals the last arrived.", ranks, 1, "priority"),
        ("priority, two", "Under priority the number decides, and only then arrival.", ranks, 3, "priority"),
        (
            "priority, three",
            "A request of low priority is preempted before a later, more urgent one.",
            ranks,
            6,
            "priority",
        ),
        ("fcfs has no use for priority", "Under fcfs the priority does not matter.", ranks, 4, "fcfs"),
    ]
    for number in range(4):
        arrivals = torch.randperm(20, generator=generator)[:6].tolist()
        priorities, blocks = _random(generator, 0, 3, 6), _random(generator, 1, 6, 6)
        running = list(zip(arrivals, priorities, blocks, strict=True))
        policy = ("fcfs", "priority")[number % 2]
        rule = "The order of the list is not the order of arrival: look at the numbers."
        settings.append((f"drawn {number + 1}", rule, running, sum(blocks[:3]), policy))
    for label, rule, running, needed, policy in settings:
        text = f"{label}: {policy}, {needed} blocks of {running}"
        yield Case(text, (running, needed, policy), _lost(running, needed, policy), rule)


def _first_cheaper(token: float, pair: float, moved: float, start: float) -> float:
    """Find it by halving an interval: swapping is never cheaper below it and always above."""

    def gain(n: float) -> float:
        return n * token + n * n / 2 * pair - (start + 2 * n * moved)

    low, high = 0.0, 1.0
    while gain(high) <= 0:
        low, high = high, high * 2
        if high > 1e15:
            return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) <= 0 else (low, middle)
    return high if high > 1e-12 else 0.0


def _crossover_cases(generator: torch.Generator) -> Iterator[Case]:
    us = 1e-6
    settings = [
        (
            "a slow bus",
            "Attention makes recomputing grow with n², so a swap wins in the end.",
            (86 * us, 4e-9, 52 * us, 0),
        ),
        ("a start-up time", "A swap costs its start-up time even for one token.", (90 * us, 0, 20 * us, 1e-3)),
        (
            "both",
            "The two costs are equal where n² / 2 · pair + n · (token - 2 moved) = start.",
            (86 * us, 4e-9, 40 * us, 2e-3),
        ),
        (
            "a slow bus that starts late",
            "2 moved may exceed token: then the crossing lies far out.",
            (50 * us, 2e-9, 60 * us, 5e-3),
        ),
        (
            "always",
            "Without a start-up time, a swap that is cheaper for one token is cheaper for all: 0.",
            (1e-3, 0, 20 * us, 0),
        ),
        ("always, with attention", "Attention can only make recomputing dearer: still 0.", (1e-3, 1e-7, 20 * us, 0)),
        (
            "never",
            "If a token is recomputed faster than it is moved twice, and attention is free, never: inf.",
            (30 * us, 0, 20 * us, 0),
        ),
        ("never, equal", "As long as it is not cheaper, swapping does not pay: inf.", (40 * us, 0, 20 * us, 0)),
        ("never, starts late", "A start-up time on top of a slower move: inf.", (30 * us, 0, 20 * us, 1e-3)),
    ]
    for number in range(3):
        token, moved, pair = (1 + 100 * torch.rand(3, generator=generator, dtype=torch.float64)).tolist()
        settings.append(
            (f"drawn {number + 1}", "Out and in: each token moves twice.", (token * us, pair * 1e-10, moved * us, 1e-3))
        )
    for label, rule, costs in settings:
        yield Case(f"{label}: {', '.join(f'{cost:.3g}' for cost in costs)} s", costs, _first_cheaper(*costs), rule)


def _engine_cases(generator: torch.Generator) -> Iterator[Case]:
    owed = (
        "Who was preempted comes back before others, with all its tokens to compute: one token is owed to each behind."
    )
    long = "Who runs gets its token first; the prompt gets the rest."
    settings: list[tuple[str, str, list[tuple[int, int]], int, int, int]] = [
        ("one request", "A prompt longer than the budget is computed in chunks.", [(10, 3)], 4, 2, 0),
        ("three requests", "A place that becomes free is filled in the next step.", [(3, 4), (2, 1), (5, 2)], 4, 2, 0),
        ("a long prompt beside decodes", long, [(2, 9), (2, 9), (30, 2)], 5, 3, 0),
        ("a preempted one is back", owed, [(30, 2), (1, 9), (1, 5), (4, 2)], 6, 4, 3),
        ("two preempted ones are back", owed, [(9, 4), (12, 3), (1, 6), (2, 2)], 4, 3, 3),
        ("more requests than places", "There are never more sequences than places.", [(4, 3)] * 7, 16, 2, 0),
        ("a small budget", "There are never more tokens than the budget.", [(6, 2), (7, 2), (8, 2)], 3, 3, 0),
        ("many short ones", "First come, first served.", [(1, output) for output in (5, 1, 3, 1, 4, 2)], 8, 3, 0),
    ]
    for number in range(3):
        prompts, outputs = _random(generator, 1, 40, 9), _random(generator, 1, 9, 9)
        places = _random(generator, 2, 4, 1)[0]
        requests = list(zip(prompts, outputs, strict=True))
        settings.append((f"drawn {number + 1}", "Every request ends.", requests, places + 6 * number, places, number))
    for label, rule, requests, budget, places, running in settings:
        text = f"{label}: budget {budget}, {places} places"
        arguments = (requests, budget, places, running)
        yield Case(text, arguments, count_steps(*arguments), rule)


CHECKS = [
    Check(
        name="tokens_for_each",
        lesson=LESSON,
        task="Return how many tokens each running sequence gets, in order: at least one each, at most what it lacks, "
        "at most threshold unless that is 0, together at most budget. The first takes all it can.",
        lesson_learnt="Nobody who generates ever waits for a prompt: the prompt gets what is left.",
        cases=_budget_cases,
        hints=(
            "Walk through the list with two numbers: the budget that is left, and how many sequences come behind.",
            "Each of those behind is owed one token: a sequence may take at most budget - behind.",
            "min(missing, threshold or missing, budget - behind) is what it gets; then budget shrinks by that.",
        ),
    ),
    Check(
        name="victims",
        lesson=LESSON,
        task="Return the positions in `running` of those that are preempted until `needed` blocks are free, in the "
        "order in which they lose them; each of `running` is (arrival, priority, blocks).",
        lesson_learnt="The first in order never loses its blocks, so at least one always comes to its end.",
        cases=_victim_cases,
        hints=(
            "Who is served last is preempted first: turn the order of service around.",
            'Under "fcfs" the key is arrival, under "priority" it is (priority, arrival); low numbers come first.',
            "sorted(range(len(running)), key=…, reverse=True), then take from the front until the blocks suffice.",
        ),
    ),
    Check(
        name="swap_pays_from",
        lesson=LESSON,
        task="Recomputing n tokens takes n · token + n² / 2 · pair seconds, swapping them out and in takes "
        "start + 2 · n · moved. Return the n above which swapping is cheaper: 0 if always, math.inf if never.",
        lesson_learnt="Both costs grow with n, so what decides is the ratio of two speeds: arithmetic and bus.",
        cases=_crossover_cases,
        hints=(
            "Write recompute - swap as pair / 2 · n² + (token - 2 · moved) · n - start, and look for its largest root.",
            "With pair = 0 it is a straight line: start / (token - 2 · moved), or never if that slope is not above 0.",
            "Otherwise the quadratic formula with a plus; start is at least 0, so one root is not negative.",
        ),
        rtol=1e-6,
    ),
    EngineCheck(
        name="schedule",
        lesson=LESSON,
        task="Return the plan of one step, a dict from name to tokens. running and waiting are lists of (name, tokens "
        "it lacks), the first come first; at most `places` may run and `budget` tokens be computed.",
        lesson_learnt="That is continuous batching with chunked prefill; the rest of a real scheduler is about blocks.",
        cases=_engine_cases,
        hints=(
            "First the running ones, in order: min(missing, what is left of the budget minus one for each behind it).",
            "Then those that wait, in order, as long as there is a place and at least one token: min(missing, left).",
            "Stop at the first that cannot be admitted: nobody overtakes.",
            "Who is admitted counts as running: len(plan) is the number of places in use.",
        ),
    ),
]
