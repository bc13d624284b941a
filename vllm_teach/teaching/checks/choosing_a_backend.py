"""Checks of lesson 05: the batch's length, a rule for a machine, a refusal to mend, a crossover to find on a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, LocalWindow
from vllm_teach.backends import AttentionSpec, Hardware, flash_attn
from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "05_choosing_a_backend"

_CALL = AttentionSpec(
    2, 512, 512, q_heads=8, kv_heads=8, head_dim=64, dtype=torch.float16, device="cuda", pattern=Causal()
)
_BLOCKS = BlockSparsePattern([[True, False], [True, True]], 256)
_V100, _T4, _A100, _H100 = (Hardware(cuda_capability=of) for of in ((7, 0), (7, 5), (8, 0), (9, 0)))
_GTX1080 = Hardware(cuda_capability=(6, 1))


def _length_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The scores are batch * q_len * kv_len; a square with as many has the root of that as its side."
    sizes = [(1, 300, 300), (64, 300, 300), (1, 1, 4096), (32, 1, 4096), (3, 100, 250), (1, 1, 1), (2, 1, 1)]
    sizes += [tuple(torch.randint(1, 900, (3,), generator=generator).tolist()) for _ in range(5)]
    for batch, q_len, kv_len in sizes:
        scores = batch * q_len * kv_len
        side = 0  # by counting, not by a formula
        while (side + 1) ** 2 <= scores:
            side += 1
        yield Case(f"batch {batch}, {q_len} queries, {kv_len} keys", (batch, q_len, kv_len), side, rule)
    rule = "A float has 53 significant bits and rounds the root of a large number up: math.isqrt does not."
    side = 2**40
    yield Case("one score short of a square, beyond what a float holds", (1, side - 1, side + 1), side - 1, rule)


def _named(expected: str) -> Judged:
    def problem(got: Any) -> str | None:
        return None if isinstance(got, str) and got == expected else f"expected {expected!r}, got {got!r}"

    return Judged(problem)


# (what, call, machine, who serves): worked out by hand from what the libraries support.
_SERVED = (
    ("float16 on an A100", _CALL, _A100, "flash_attn"),
    ("a long call on an H100", replace(_CALL, q_len=8192, kv_len=8192), _H100, "flash_attn"),
    ("float16 on a T4", _CALL, _T4, "xformers"),
    ("float16 on a V100", _CALL, _V100, "xformers"),
    ("float16 on a GTX 1080", _CALL, _GTX1080, "sdpa"),
    ("float32 on an A100", replace(_CALL, dtype=torch.float32), _A100, "xformers"),
    ("softcap on an A100", replace(_CALL, softcap=30.0), _A100, "flash_attn"),
    ("softcap on a T4", replace(_CALL, softcap=30.0), _T4, "naive"),
    ("softcap in float32", replace(_CALL, softcap=30.0, dtype=torch.float32), _A100, "naive"),
    ("ALiBi on an A100", replace(_CALL, alibi=True), _A100, "flash_attn"),
    ("ALiBi in float32", replace(_CALL, alibi=True, dtype=torch.float32), _A100, "sdpa"),
    ("a block-sparse pattern", replace(_CALL, pattern=_BLOCKS), _H100, "sdpa"),
    ("a window on a T4", replace(_CALL, pattern=LocalWindow(63, 0)), _T4, "xformers"),
    ("paged, blocks of 256", replace(_CALL, q_len=1, layout="paged", block_size=256), _A100, "flash_attn"),
    ("paged, blocks of 16", replace(_CALL, q_len=1, layout="paged", block_size=16), _A100, "sdpa"),
    ("float64", replace(_CALL, dtype=torch.float64), _A100, "sdpa"),
    ("dropout with a seed", replace(_CALL, dropout=True), _A100, "naive"),
)


def _rule_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = (
        "Two questions for each candidate in turn: does it take the call, and can it run here? The first with two yes."
    )
    for what, spec, hardware, name in _SERVED:
        yield Case(what, (spec, hardware), _named(name), rule)
    rule = "hardware.unusable counts, too: a library that does not load here is passed over, whatever the GPU."
    broken = Hardware(cuda_capability=(8, 0), unusable=(("flash_attn", "It does not load."),))
    yield Case("flash_attn does not load", (_CALL, broken), _named("xformers"), rule)


def _mended(before: AttentionSpec) -> Judged:
    def problem(got: Any) -> str | None:
        if not isinstance(got, AttentionSpec):
            return f"expected an AttentionSpec, got {type(got).__name__}"
        names = [field.name for field in fields(before)]
        changed = [name for name in names if getattr(before, name) != getattr(got, name)]
        if len(changed) != 1:
            return f"changed {', '.join(changed) or 'nothing'}; exactly one field is to change"
        if changed == ["device"]:
            return "moved the call to another device; it is to run on this GPU"
        reason = flash_attn.supports(got)
        return None if reason is None else f"changed {changed[0]}, and it still refuses: {reason}"

    return Judged(problem)


def _mend_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The reason names the field and what it may be; dataclasses.replace(spec, field=value) leaves all others."
    refused = {
        "float32": replace(_CALL, dtype=torch.float32),
        "float64": replace(_CALL, dtype=torch.float64),
        "head_dim 320": replace(_CALL, head_dim=320),
        "paged in blocks of 16": replace(_CALL, q_len=1, layout="paged", block_size=16),
        "paged in blocks of 384": replace(_CALL, q_len=1, layout="paged", block_size=384),
        "a block-sparse pattern": replace(_CALL, pattern=_BLOCKS),
        "dropout with a seed": replace(_CALL, dropout=True),
    }
    for what, spec in refused.items():
        reason = flash_attn.supports(spec)
        assert reason is not None
        yield Case(what, (spec, reason), _mended(spec), rule)


class BudgetUsedUpError(Exception):
    """More seconds measured than the exercise allows."""


Line = tuple[float, float, float]  # seconds to start, per token, per token squared


def stopwatch(first: Line, second: Line, budget: float) -> Callable[[float], tuple[float, float]]:
    """Return measure(length) -> seconds of two backends. A closure: it has nothing to read.

    Each call uses up the seconds that it returns; the one that would exceed `budget` raises BudgetUsedUpError.
    """
    left = budget

    def measure(length: float) -> tuple[float, float]:
        nonlocal left
        if not 16 <= length <= 65_536:
            raise ValueError(f"length={length} is out of range: measure between 16 and 65,536 tokens.")
        seconds = _seconds(first, length), _seconds(second, length)
        left -= sum(seconds)
        if left < 0:
            raise BudgetUsedUpError(f"the budget of {budget:g} s is used up: begin with lengths that cost little.")
        return seconds

    return measure


def _seconds(line: Line, length: float) -> float:
    return line[0] + line[1] * length + line[2] * length**2


def _crossing(first: Line, second: Line) -> float:
    """Where the second becomes the faster one: the positive root of a quadratic equation."""
    c, b, a = (second[i] - first[i] for i in range(3))
    return (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)


def _near(length: float) -> Judged:
    def problem(got: Any) -> str | None:
        value = got.item() if isinstance(got, torch.Tensor) and got.numel() == 1 else got
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"expected a length, got {type(got).__name__}"
        return (
            None
            if abs(value / length - 1) <= 0.1
            else f"expected {length:,.0f} tokens to within 10 %, got {value:,.0f}"
        )

    return Judged(problem)


def _crossover_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Costs grow with the square: start short, double until the order turns, then halve the stretch in between."
    pairs: dict[str, tuple[Line, Line]] = {
        "crossing among short calls": ((20e-6, 0.0, 6e-9), (150e-6, 0.0, 1e-9)),
        "crossing in the middle": ((50e-6, 1e-7, 5e-9), (3e-3, 2e-7, 2e-9)),
        "crossing among long calls": ((1e-4, 0.0, 4e-9), (0.15, 0.0, 2.5e-9)),
        "almost parallel": ((1e-5, 0.0, 3e-9), (4e-4, 0.0, 2.8e-9)),
    }
    for what, (first, second) in pairs.items():
        crossing = _crossing(first, second)
        # Enough for a doubling search and some looks around the crossing, never for one at the far end.
        budget = 22 * (_seconds(first, crossing) + _seconds(second, crossing))
        watch = MadeAnew(partial(stopwatch, first, second, budget))
        yield Case(f"{what}, a budget of {budget:.3g} s", (watch, budget), _near(crossing), rule)


CHECKS = [
    Check(
        name="length_of_the_batch",
        lesson=LESSON,
        task="Return the length n of one sequence whose n * n scores are as many as the batch's, rounded down.",
        lesson_learnt="64 chats of 300 tokens weigh as much as a document of 2,400; a decode step next to nothing.",
        cases=_length_cases,
        hints=(
            "How many scores has one sequence? q_len * kv_len. And the batch?",
            "The side of a square is the root of its area. Rounded down, for whole numbers: math.isqrt.",
        ),
    ),
    Check(
        name="rule_for_gpus",
        lesson=LESSON,
        task="Return the first of flash_attn, xformers, sdpa, naive that takes the call and can run on the machine.",
        lesson_learnt="That is a selector: an order, two questions for each, and the first who answers yes twice.",
        cases=_rule_cases,
        hints=(
            "A loop over the four names in that order, with a return inside.",
            "backends.get(name).supports(spec) says None or why it refuses such a call, on any machine.",
            "hardware.why_not(name, spec.device) says None or why it cannot run on this machine. Both must be None.",
        ),
    ),
    Check(
        name="mend_the_call",
        lesson=LESSON,
        task="Return the call with exactly one field changed, so that flash_attn takes it; the device stays.",
        lesson_learnt="A refusal that names field and limit is half of the repair; the other half: ask your users.",
        cases=_mend_cases,
        hints=(
            "print(reason) first: it names the dtype, the head_dim, the pattern, the block_size or the dropout.",
            "Look at the spec: which of its fields has the value that the reason complains of?",
            "torch.float16; head_dim 256; block_size 256; pattern=Causal(); dropout=False. One of them, by the reason.",
        ),
    ),
    Check(
        name="find_the_crossover",
        lesson=LESSON,
        task="Return the length at which the second backend becomes the faster one, to within 10 %, within the budget.",
        lesson_learnt="`vllm-teach tune` does likewise: short calls first, and none that is hopeless.",
        cases=_crossover_cases,
        hints=(
            "The cost of one look grows with the square of the length. So the cheap looks are at the short end.",
            "Double the length until the second backend is the faster one: the crossing lies in the last stretch.",
            "Halve that stretch a few times. Its middle on a logarithmic scale is the root of low * high.",
        ),
    ),
]
