"""Lesson 05's checks: the right answers pass, and each known-wrong one is rejected."""

import math
from dataclasses import replace

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import Causal
from vllm_teach.teaching import check
from vllm_teach.teaching.checks.choosing_a_backend import BudgetUsedUpError, stopwatch

ORDER = ("flash_attn", "xformers", "sdpa", "naive")


def rule(spec, hardware, *, order=ORDER, takes=True, runs=True, last=False):
    """The rule with switches for what can go wrong."""
    found = [
        name
        for name in order
        if (not takes or backends.get(name).supports(spec) is None)
        and (not runs or hardware.why_not(name, spec.device) is None)
    ]
    return found[-1 if last else 0] if found else order[0]


def mend(spec, reason):
    """Read the reason, change what it names."""
    changes = {
        "computes in": {"dtype": torch.bfloat16},
        "head_dim": {"head_dim": 256},
        "block_size": {"block_size": 256},
        "neither": {"pattern": Causal()},
        "dropout": {"dropout": False},
    }
    return replace(spec, **next(change for words, change in changes.items() if words in reason))


def mend_by_looking(spec, reason):
    """Right without reading: tries one change after another until the library agrees."""
    tries = (
        {"dtype": torch.float16},
        {"head_dim": 128},
        {"block_size": 512},
        {"pattern": None},
        {"dropout": False},
    )
    mended = [replace(spec, **one) for one in tries]
    return next(one for one in mended if one != spec and backends.get("flash_attn").supports(one) is None)


def ahead(measure, length):
    first, second = measure(length)
    return second < first


def find(measure, budget, *, start=16.0, halvings=6, geometric=True):
    low, high = start, start * 2
    while not ahead(measure, high):
        low, high = high, high * 2
    for _ in range(halvings):
        middle = math.sqrt(low * high) if geometric else (low + high) / 2
        low, high = (low, middle) if ahead(measure, middle) else (middle, high)
    return math.sqrt(low * high)


def find_from_the_top(measure, budget):
    length = 65_536.0
    while ahead(measure, length):
        length /= 1.1
    return length


def find_by_bisecting_everything(measure, budget):
    low, high = 16.0, 65_536.0
    while high / low > 1.05:
        middle = (low + high) / 2
        low, high = (low, middle) if ahead(measure, middle) else (middle, high)
    return low


def find_step_by_step(measure, budget):
    length = 16.0
    while not ahead(measure, length):
        length += 16
    return length


def find_the_last_doubling(measure, budget):
    length = 16.0
    while not ahead(measure, length):
        length *= 2
    return length


def find_by_one_line(measure, budget):
    """Extrapolates from two short calls, as if costs were straight lines."""
    (a, b), (c, d) = measure(16), measure(32)
    gap, closing = b - a, (b - a) - (d - c)
    return 16 + 16 * gap / closing if closing > 0 else 65_536.0


RIGHT = {
    "length_of_the_batch": [lambda b, q, k: math.isqrt(b * q * k), lambda b, q, k: torch.tensor(math.isqrt(b * q * k))],
    "rule_for_gpus": [rule],
    "mend_the_call": [mend, mend_by_looking],
    "find_the_crossover": [find, lambda m, b: find(m, b, start=64.0), lambda m, b: find(m, b, geometric=False)],
}
WRONG = {
    "length_of_the_batch": {
        "scores, not a length": lambda b, q, k: b * q * k,
        "tokens": lambda b, q, k: b * max(q, k),
        "the longer side": lambda b, q, k: max(q, k),
        "batch forgotten": lambda b, q, k: math.isqrt(q * k),
        "square of queries": lambda b, q, k: math.isqrt(b * q * q),
        "square of keys": lambda b, q, k: math.isqrt(b * k * k),
        "root of the batch alone": lambda b, q, k: math.isqrt(b) * max(q, k),
        "rounded up": lambda b, q, k: math.isqrt(b * q * k - 1) + 1,
        "rounded to the nearest": lambda b, q, k: round(math.sqrt(b * q * k)),
        "not rounded": lambda b, q, k: math.sqrt(b * q * k),
        "through a float": lambda b, q, k: int(math.sqrt(b * q * k)),
        "half of the scores": lambda b, q, k: math.isqrt(b * q * k // 2),
    },
    "rule_for_gpus": {
        "the machine not asked": lambda s, h: rule(s, h, runs=False),
        "the call not asked": lambda s, h: rule(s, h, takes=False),
        "nobody asked": lambda s, h: rule(s, h, takes=False, runs=False),
        "the last that can": lambda s, h: rule(s, h, last=True),
        "xformers first": lambda s, h: rule(s, h, order=("xformers", "flash_attn", "sdpa", "naive")),
        "sdpa before xformers": lambda s, h: rule(s, h, order=("flash_attn", "sdpa", "xformers", "naive")),
        "without naive": lambda s, h: rule(s, h, order=ORDER[:3]),
        "the articles' rule": lambda s, h: backends.select_backend(s, hardware=h).choice,
        "capability alone": lambda s, h: "flash_attn" if h.cuda_capability >= (8, 0) else "xformers",
        "tensor cores": lambda s, h: "flash_attn" if h.has_tensor_cores else rule(s, h),
        "the module": lambda s, h: backends.get(rule(s, h)),
        "a list": lambda s, h: [rule(s, h)],
        "this machine": lambda s, h: rule(s, backends.detect_hardware()),
        "a broken library called": lambda s, h: rule(s, replace(h, unusable=())),
        "asked about a CPU": lambda s, h: rule(replace(s, device="cpu"), h),
    },
    "mend_the_call": {
        "nothing changed": lambda s, r: s,
        "another device": lambda s, r: replace(s, device="cpu"),
        "always float16": lambda s, r: replace(s, dtype=torch.float16),
        "always causal": lambda s, r: replace(s, pattern=Causal()),
        "everything at once": lambda s, r: replace(
            s, dtype=torch.float16, head_dim=64, pattern=Causal(), dropout=False, block_size=None, layout="dense"
        ),
        "another call": lambda s, r: replace(s, batch=s.batch + 1),
        "layout without block size": lambda s, r: replace(s, layout="dense") if s.block_size else mend(s, r),
        "blocks of 128": lambda s, r: replace(s, block_size=128) if s.block_size else mend(s, r),
        "head_dim 512": lambda s, r: replace(s, head_dim=512) if "head_dim" in r else mend(s, r),
        "dtype and device": lambda s, r: replace(s, dtype=torch.float16, device="cpu"),
        "the reason": lambda s, r: r,
        "a dictionary": lambda s, r: vars(mend(s, r)),
        "the changed value": lambda s, r: torch.float16,
        "one too many": lambda s, r: replace(mend(s, r), softcap=1.0),
    },
    "find_the_crossover": {
        "from the top": find_from_the_top,
        "bisecting everything": find_by_bisecting_everything,
        "step by step": find_step_by_step,
        "the last doubling": find_the_last_doubling,
        "a straight line": find_by_one_line,
        "two halvings too few": lambda m, b: find(m, b, halvings=0),
        "half of it": lambda m, b: find(m, b) / 2,
        "the article's number": lambda m, b: 1024.0,
        "looks for the first instead": lambda m, b: find(lambda n: m(n)[::-1], b),
        "reads what is hidden": lambda m, b: m.crossing,
        "catches the alarm": lambda m, b: _until_the_budget_is_gone(m),
    },
}


def _until_the_budget_is_gone(measure):
    length = 65_536.0
    try:
        while ahead(measure, length):
            length /= 2
    except BudgetUsedUpError:
        pass
    return length


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
    assert getattr(check, name)(answer).status in ("wrong", "error")


def test_a_choice_by_hand_is_what_the_backends_say():
    """The names in the check are worked out by hand; the rule in this file asks the backends."""
    for case in check.rule_for_gpus.cases():
        assert case.expected.problem(rule(*case.arguments)) is None, case.label


def test_the_reason_that_is_handed_over_is_the_librarys():
    for case in check.mend_the_call.cases():
        spec, reason = case.arguments
        assert reason == backends.get("flash_attn").supports(spec)


def test_what_a_wrong_repair_is_told():
    (spec, _), *_ = (case.arguments for case in check.mend_the_call.cases())
    problem = check.mend_the_call.cases()[0].expected.problem
    assert "exactly one field" in problem(spec)
    assert "another device" in problem(replace(spec, device="cpu"))
    assert "still refuses" in problem(replace(spec, dtype=torch.float64))


def test_the_stopwatch_takes_what_it_measures():
    measure = stopwatch((1.0, 0.0, 0.0), (0.0, 0.5, 0.0), budget=20.0)
    assert measure(16) == (1.0, 8.0)
    assert vars(measure) == {}
    with pytest.raises(BudgetUsedUpError, match="budget of 20 s"):
        measure(32)
    with pytest.raises(ValueError, match="out of range"):
        measure(8)


def test_one_look_at_the_far_end_costs_more_than_the_budget():
    assert "within the budget" in check.find_the_crossover.task
    for case in check.find_the_crossover.cases():
        measure, _ = case.fresh_arguments()
        with pytest.raises(BudgetUsedUpError):
            measure(65_536)
