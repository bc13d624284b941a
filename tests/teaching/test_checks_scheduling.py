"""Lesson 08's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest

from vllm_teach.teaching import check


def tokens_for_each(budget, missing, threshold, *, owed=True, cap=True, limit=True):
    given = []
    for place, lacks in enumerate(missing):
        behind = len(missing) - place - 1 if owed else 0
        most = budget - behind if limit else budget + 10**6
        given.append(min(lacks, (threshold or lacks) if cap else lacks, max(most, 1)))
        budget -= given[-1]
    return given


def evenly(budget, missing, threshold):
    share = budget // len(missing)
    return [min(lacks, threshold or lacks, share) for lacks in missing]


def smallest_first(budget, missing, threshold):
    order = sorted(range(len(missing)), key=lambda i: missing[i])
    given = tokens_for_each(budget, [missing[i] for i in order], threshold)
    return [given[order.index(i)] for i in range(len(missing))]


def decodes_first_then_greedy(budget, missing, threshold):
    """Only those that decode are owed a token; a prompt behind another may get none."""
    left, given = budget - missing.count(1), []
    for lacks in missing:
        given.append(1 if lacks == 1 else min(lacks, threshold or lacks, left))
        left -= 0 if lacks == 1 else given[-1]
    return given


def victims(running, needed, policy, *, sign=1, always=None, stop_late=False, one=False):
    policy = always or policy
    key = (lambda i: running[i][0]) if policy == "fcfs" else (lambda i: (running[i][1], running[i][0]))
    order, taken, freed = sorted(range(len(running)), key=key, reverse=sign > 0), [], 0
    for index in order:
        if freed > needed or (freed == needed and not stop_late) or (one and taken):
            break
        taken.append(index)
        freed += running[index][2]
    return taken


def by_size(running, needed, policy):
    order, taken, freed = sorted(range(len(running)), key=lambda i: -running[i][2]), [], 0
    for index in order:
        if freed >= needed:
            break
        taken.append(index)
        freed += running[index][2]
    return taken


def priority_then_first_arrived(running, needed, policy):
    order = sorted(range(len(running)), key=lambda i: (-running[i][1] if policy == "priority" else 0, -running[i][0]))
    if policy == "priority":
        order = sorted(range(len(running)), key=lambda i: (-running[i][1], running[i][0]))
    taken = []
    while sum(running[i][2] for i in taken) < needed:
        taken.append(order[len(taken)])
    return taken


def from_the_end_of_the_list(running, needed, policy):
    taken = []
    while sum(running[i][2] for i in taken) < needed:
        taken.append(len(running) - 1 - len(taken))
    return taken


def swap_pays_from(token, pair, moved, start, *, moves=2, half=True, with_start=True, guard=True):
    slope, start, pair = token - moves * moved, start if with_start else 0, pair if half else 2 * pair
    if pair == 0:
        if slope > 0:
            return start / slope
        return math.inf if guard else 0.0
    return (-slope + math.sqrt(slope**2 + 2 * pair * start)) / pair


def by_search(token, pair, moved, start):
    def gain(n):
        return n * token + n * n / 2 * pair - start - 2 * n * moved

    high = 1e-9
    while gain(high) <= 0:
        high *= 2
        if high > 1e15:
            return math.inf
    low = 0.0
    for _ in range(300):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) <= 0 else (low, middle)
    return 0 if high < 1e-9 else high


def schedule(running, waiting, budget, places, *, owed=True, chunks=True, admit="prefix", room=True, decodes=True):
    plan = {}
    for place, (name, missing) in enumerate(running):
        behind = len(running) - place - 1 if owed else 0
        tokens = max(min(missing, budget - behind), 0)
        if tokens and (decodes or missing > 1):
            plan[name] = tokens
            budget -= tokens
    for name, missing in waiting:
        if (room and len(plan) >= places) or budget <= 0:
            break
        if missing > budget and not chunks:
            if admit == "prefix":
                break
            continue
        plan[name] = min(missing, budget)
        budget -= plan[name]
        if admit == "one":
            break
    return plan


def static(running, waiting, budget, places):
    return schedule(running, [] if running else waiting, budget, places)


def prefill_first(running, waiting, budget, places):
    plan = {}
    for name, missing in [*((n, m) for n, m in running if m > 1), *waiting[: places - len(running)]]:
        if budget > 0:
            plan[name] = min(missing, budget)
            budget -= plan[name]
    return plan or {name: 1 for name, _ in running}


def shortest_first(running, waiting, budget, places):
    return schedule(running, sorted(waiting, key=lambda each: each[1]), budget, places)


def greedy_last(running, waiting, budget, places):
    return schedule(list(reversed(running)), waiting, budget, places)


def no_budget(running, waiting, budget, places):
    return schedule(running, waiting, 10**6, places)


def with_zeros(running, waiting, budget, places):
    plan = schedule(running, waiting, budget, places)
    return {name: 0 for name, _ in waiting} | plan


def popping(running, waiting, budget, places):
    plan = schedule(running, waiting, budget, places)
    while waiting and waiting[0][0] in plan:
        running.append(waiting.pop(0))
    return plan


def forgets_the_running_in_places(running, waiting, budget, places):
    plan = schedule(running, [], budget, places)
    left = budget - sum(plan.values())
    return plan | schedule([], waiting, left, places)


def half_the_budget(running, waiting, budget, places):
    return schedule(running, waiting, max(len(running), budget // 2, 1), places)


calls = 0


def remembers(running, waiting, budget, places):
    global calls
    calls += 1
    return schedule(running, waiting if calls % 2 else [], budget, places)


RIGHT = {
    "tokens_for_each": [tokens_for_each, lambda *a: tuple(tokens_for_each(*a))],
    "victims": [victims, lambda *a: tuple(victims(*a))],
    "swap_pays_from": [swap_pays_from, by_search],
    "schedule": [schedule],
}
WRONG = {
    "tokens_for_each": {
        "nothing owed to those behind": lambda *a: tokens_for_each(*a, owed=False),
        "no threshold": lambda *a: tokens_for_each(*a, cap=False),
        "no budget": lambda *a: tokens_for_each(*a, limit=False),
        "shared evenly": evenly,
        "the shortest first": smallest_first,
        "from the end": lambda b, m, t: tokens_for_each(b, m[::-1], t)[::-1],
        "one token each": lambda b, m, t: [1] * len(m),
        "all they lack": lambda b, m, t: list(m),
        "only decodes are owed": decodes_first_then_greedy,
        "threshold 0 taken literally": lambda b, m, t: [max(1, min(x, t)) for x in tokens_for_each(b, m, 0)],
        "the sum": lambda *a: sum(tokens_for_each(*a)),
    },
    "victims": {
        "the first arrived": lambda *a: victims(*a, sign=-1),
        "always fcfs": lambda *a: victims(*a, always="fcfs"),
        "always priority": lambda *a: victims(*a, always="priority"),
        "one too many": lambda *a: victims(*a, stop_late=True),
        "only one": lambda *a: victims(*a, one=True),
        "who holds most": by_size,
        "of equal priority the first": priority_then_first_arrived,
        "the list's order": from_the_end_of_the_list,
        "arrivals, not positions": lambda r, n, p: [r[i][0] for i in victims(r, n, p)],
        "in the order of service": lambda *a: victims(*a)[::-1],
        "sorted positions": lambda *a: sorted(victims(*a)),
    },
    "swap_pays_from": {
        "moved once": lambda *a: swap_pays_from(*a, moves=1),
        "n squared without the half": lambda *a: swap_pays_from(*a, half=False),
        "no start-up time": lambda *a: swap_pays_from(*a, with_start=False),
        "never taken for always": lambda *a: swap_pays_from(*a, guard=False),
        "no attention": lambda token, pair, moved, start: swap_pays_from(token, 0.0, moved, start),
        "the other root": lambda t, p, m, s: -swap_pays_from(t, p, m, s) if p else swap_pays_from(t, p, m, s),
        "rounded": lambda *a: round(x) if math.isfinite(x := swap_pays_from(*a)) else x,
        "never": lambda *a: math.inf,
        "always": lambda *a: 0.0,
        "the package's, without a start": lambda t, p, m, s: (
            0.0 if t > 2 * m else 2 * (2 * m - t) / p if p else math.inf
        ),
    },
    "schedule": {
        "nothing owed to those behind": lambda *a: schedule(*a, owed=False),
        "whole prompts only": lambda *a: schedule(*a, chunks=False),
        "whole prompts, overtaking": lambda *a: schedule(*a, chunks=False, admit="any"),
        "one admitted a step": lambda *a: schedule(*a, admit="one"),
        "no limit of places": lambda *a: schedule(*a, room=False),
        "decodes forgotten": lambda *a: schedule(*a, decodes=False),
        "static": static,
        "prefill first": prefill_first,
        "the shortest prompt first": shortest_first,
        "the last first": greedy_last,
        "no budget": no_budget,
        "zeros for those that wait": with_zeros,
        "inputs changed": popping,
        "places without those that run": forgets_the_running_in_places,
        "half of the budget": half_the_budget,
        "another plan at each call": remembers,
        "a list of pairs": lambda *a: list(schedule(*a).items()),
        "nobody": lambda *a: {},
        "a name of its own": lambda *a: schedule(*a) | {"Z": 1},
        "floats": lambda *a: {name: float(tokens) for name, tokens in schedule(*a).items()},
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(name, a, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, a in wrong.items()],
)
def test_wrong(name, answer):
    result = getattr(check, name)(answer)
    assert result.status in ("wrong", "error")
    assert "Rule: " in result.message or result.status == "error"


def test_the_simulation_says_which_step_and_what_the_rule_is():
    result = check.schedule(lambda running, waiting, budget, places: schedule(running, waiting, 10**6, places))
    assert "step 1, running []" in result.message
    assert "the plan has 10 tokens, and the budget is 4" in result.message


def test_a_stub_inside_the_simulation_is_unsolved():
    def stub(running, waiting, budget, places):
        raise NotImplementedError

    assert check.schedule(stub).status == "unsolved"
    assert check.schedule(lambda *_: None).status == "unsolved"
