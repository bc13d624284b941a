"""Checks of lesson 13: an outcome by a rule, a batch implied by two rows, an experiment, an unfair comparison."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check
from vllm_teach.validation.audit.finding import COUNTED, Finding

LESSON = "13_reference_tables_audited"
OUTCOMES = ("holds", "direction only", "fails")


def _judge_word(expected: str) -> Judged:
    def problem(got: object) -> str | None:
        if got == expected and isinstance(got, str):
            return None
        return f"expected {expected!r}, got {got!r:.80}; the words are {', '.join(map(repr, OUTCOMES))}"

    return Judged(problem)


def _outcome(low: float, high: float, ratios: Sequence[float]) -> str:
    """Count how many of the ratios lie on either side, instead of sorting them."""
    if any(ratio <= 1 for ratio in ratios):
        return "fails"
    below = sum(ratio < low for ratio in ratios)
    above = sum(ratio > high for ratio in ratios)
    return "holds" if max(below, above) <= len(ratios) // 2 else "direction only"


def _outcome_cases(generator: torch.Generator) -> Iterator[Case]:
    settings: list[tuple[str, str, float, float, list[float]]] = [
        ("in the middle", "A median inside the range holds.", 1.5, 6.0, [3.7, 3.8, 3.6, 4.3, 3.9]),
        ("too large", "Above the range the direction holds, and not the size.", 1.5, 6.0, [9.0, 8.0, 11.0]),
        ("too small", "Below the range but above 1: direction only.", 1.5, 6.0, [1.2, 1.3, 1.4]),
        ("slower", "Below 1 it is slower: it fails.", 1.5, 6.0, [0.9, 0.8, 0.7]),
        (
            "one round of many was slower",
            "A spread that reaches 1 shows no effect.",
            1.5,
            6.0,
            [2.0, 0.9, 2.4, 2.1, 2.2],
        ),
        ("exactly no effect", "A round of exactly 1 shows no effect.", 1.5, 6.0, [1.0, 2.0, 3.0]),
        ("one outlier", "The median decides, not the mean.", 1.5, 6.0, [2.0, 2.1, 90.0]),
        ("the best round holds", "The median decides, not the best round.", 3.0, 6.0, [1.1, 1.2, 5.0]),
        ("the first round holds", "The median decides, whatever the order.", 3.0, 6.0, [4.0, 1.1, 1.2, 1.3, 1.4]),
        ("at the lower end", "Both ends belong to the range.", 1.5, 6.0, [1.5, 1.5, 1.5]),
        ("at the upper end", "Both ends belong to the range.", 1.5, 6.0, [5.0, 6.0, 7.0]),
    ]
    for number in range(3):
        drawn = (0.8 + 4 * torch.rand(7, generator=generator, dtype=torch.float64)).tolist()
        settings.append((f"drawn {number + 1}", "First the spread, then the median.", 1.5, 2.0 + number, drawn))
    for label, rule, low, high, ratios in settings:
        shown = ", ".join(f"{ratio:.3g}" for ratio in ratios)
        yield Case(
            f"{label}: {low} to {high}, [{shown}]", (low, high, ratios), _judge_word(_outcome(low, high, ratios)), rule
        )


def _batch(before_mb: float, after_mb: float, heads: int, length: int, element_bytes: int) -> float:
    """Add up the bytes of one sequence head by head and matrix by matrix."""
    one = sum(length * length * element_bytes for _ in range(heads) for _matrix in ("S", "P"))
    return (before_mb * 1e6 - after_mb * 1e6) / one


def _batch_cases(generator: torch.Generator) -> Iterator[Case]:
    settings: list[tuple[str, str, tuple[float, float, int, int, int]]] = [
        ("article B", "What both rows have in common cancels in the difference.", (3200.0, 1100.0, 16, 2048, 2)),
        ("nothing else in memory", "With 0 MB after, the difference is all there was.", (3200.0, 0.0, 16, 2048, 2)),
        ("float32", "A number has `element_bytes` bytes.", (640.0, 100.0, 8, 1024, 4)),
        ("another length", "A matrix has length · length numbers.", (900.0, 500.0, 16, 512, 2)),
        ("one head", "A matrix for each head.", (50.0, 10.0, 1, 2048, 2)),
        ("no difference", "No difference, no batch.", (700.0, 700.0, 16, 2048, 2)),
    ]
    for number in range(3):
        heads, length = (int(n) for n in torch.randint(4, 40, (2,), generator=generator))
        settings.append((f"drawn {number + 1}", "S and P: two matrices.", (5000.0, 800.0, heads, 64 * length, 2)))
    for label, rule, arguments in settings:
        yield Case(f"{label}: {arguments}", arguments, _batch(*arguments), rule)


def _waste(lengths: Sequence[int], block_size: int) -> float:
    """Fill blocks token by token, and count the empty slots."""
    empty, slots = 0, 0
    for length in lengths:
        free = 0
        for _ in range(length):
            if free == 0:
                slots += block_size
                free = block_size
            free -= 1
        empty += free
    return empty / slots


def _judge_finding(lengths: Sequence[int], block_size: int) -> Judged:
    expected = _waste(lengths, block_size)

    def problem(got: Any) -> str | None:
        if not isinstance(got, Finding):
            return f"expected a Finding, got {type(got).__name__}: use counted(name, value, unit, setting)"
        if got.name != "slots wasted":
            return f"the check looks for the finding 'slots wasted', and this one is called {got.name!r}"
        if not math.isclose(got.value, expected, rel_tol=1e-9, abs_tol=1e-12):
            return f"expected a value of {expected:.6g}, got {got.value:.6g}"
        if got.how != COUNTED:
            return f"how is {got.how!r}, but nothing was timed, modelled or looked up: it is {COUNTED!r}"
        for words, number in (("how many sequences", len(lengths)), ("the block size", block_size)):
            if str(number) not in got.setting:
                return f"the setting {got.setting!r} does not say {words} ({number}): nobody could run it again"
        return None

    return Judged(problem)


def _experiment_cases(generator: torch.Generator) -> Iterator[Case]:
    settings: list[tuple[str, str, list[int], int]] = [
        ("by hand", "5 tokens in blocks of 4 hold 2 blocks, 3 slots of 8 empty.", [5], 4),
        ("full blocks", "A full block wastes nothing.", [16, 32, 48], 16),
        ("one token each", "One token holds a whole block.", [1] * 10, 16),
        ("blocks of one", "Blocks of one token waste nothing.", [3, 7, 11], 1),
        ("long and short", "All empty slots over all held slots, not a mean of shares.", [1, 1000], 16),
        ("shorter than a block", "A sequence never holds less than a block.", [3, 5], 256),
    ]
    for number in range(3):
        lengths = torch.randint(1, 700, (23 + number,), generator=generator).tolist()
        settings.append((f"drawn {number + 1}", "Count slots.", lengths, (16, 32, 64)[number]))
    for label, rule, lengths, block_size in settings:
        shown = f"{lengths}" if len(lengths) <= 3 else f"{len(lengths)} lengths"
        yield Case(
            f"{label}: {shown}, blocks of {block_size}",
            (lengths, block_size),
            _judge_finding(lengths, block_size),
            rule,
        )


def _judge_names(expected: set[str]) -> Judged:
    def problem(got: Any) -> str | None:
        if not isinstance(got, list | tuple | set | frozenset):
            return f"expected names in a list, got {type(got).__name__}"
        if sorted(got, key=str) == sorted(expected):
            return None
        missed, extra = sorted(expected - set(got)), sorted(set(got) - expected, key=str)
        told = [f"{missed} should be there"] * bool(missed) + [f"{extra} should not"] * bool(extra)
        return "; ".join(told) or f"each name once: got {list(got)!r:.120}"

    return Judged(problem)


def _confounders(before: dict[str, Any], after: dict[str, Any], cause: str) -> set[str]:
    """Take away what is published on both sides and equal."""
    names = {*before, *after} - {cause}
    equal = {
        name for name in names
        if name in before and name in after and None not in (before[name], after[name]) and before[name] == after[name]
    }  # fmt: skip
    return names - equal


def _comparison_cases(generator: torch.Generator) -> Iterator[Case]:
    base: dict[str, Any] = {"attention": "naive", "batch": 8, "dtype": "float16", "length": 2048, "mask": "none"}
    settings: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
        ("a fair one", "Only the cause differs: nothing to report.", base, base | {"attention": "tiled"}, "attention"),
        (
            "another batch",
            "A setting that differs is another cause.",
            base,
            base | {"attention": "tiled", "batch": 64},
            "attention",
        ),
        (
            "two more",
            "All of them, not the first.",
            base,
            base | {"attention": "tiled", "dtype": "int4", "mask": "causal"},
            "attention",
        ),
        (
            "not published, after",
            "What only one side says may differ: it counts.",
            base,
            {name: value for name, value in base.items() if name != "batch"} | {"attention": "tiled"},
            "attention",
        ),
        (
            "not published, before",
            "What only one side says may differ: look from both sides.",
            {"system": "original"},
            {"system": "full", "cache": "warm"},
            "system",
        ),
        (
            "None on both sides",
            "None means not published: two unknowns are not known to be equal.",
            base | {"length": None},
            base | {"attention": "tiled", "length": None},
            "attention",
        ),
        (
            "zero",
            "0 is a value, and published.",
            base | {"batch": 0},
            base | {"attention": "tiled", "batch": 0},
            "attention",
        ),
    ]
    for number in range(3):
        changed = torch.randint(0, 2, (4,), generator=generator).tolist()
        others = [name for name in base if name != "attention"]
        after = base | {"attention": "tiled"} | {n: "other" for n, flag in zip(others, changed, strict=True) if flag}
        settings.append((f"drawn {number + 1}", "Compare setting by setting.", base, after, "attention"))
    for label, rule, before, after, cause in settings:
        yield Case(
            f"{label}: {before} and {after}",
            (before, after, cause),
            _judge_names(_confounders(before, after, cause)),
            rule,
        )


CHECKS = [
    Check(
        "judge_ratio",
        LESSON,
        "return 'holds', 'direction only' or 'fails' for the ratios of some rounds and an accepted range.",
        "A spread that reaches over no effect shows none, wherever its median lies.",
        _outcome_cases,
        (
            "First ask whether any round shows no effect: that alone makes it fail.",
            "Then sort the rounds and take the middle one.",
            "min(ratios) <= 1 is 'fails'; low <= median <= high is 'holds'; all else has the direction only.",
        ),
    ),
    Check(
        "implied_batch",
        LESSON,
        "compute the batch that the difference of two published memory figures implies.",
        "A difference cancels what both figures contain, and nobody has to know what that was.",
        _batch_cases,
        (
            "The two systems differ by the score matrices S and P, which only the first one holds.",
            "S and P of one sequence: 2 · heads · length² · element_bytes.",
            "An MB is 10⁶ bytes in the tables. The batch need not come out whole.",
        ),
    ),
    Check(
        "waste_finding",
        LESSON,
        "count the share of held slots that are empty, and return it as a Finding that a stranger could check.",
        "A number without its setting cannot be checked.",
        _experiment_cases,
        (
            "A sequence of n tokens holds ceil(n / block_size) blocks: -(-n // block_size).",
            "Empty slots of all sequences over held slots of all sequences.",
            "counted('slots wasted', share, '', setting), and a setting with len(lengths) and block_size in it.",
        ),
    ),
    Check(
        "other_causes",
        LESSON,
        "name every setting, but for the claimed cause, that differs between two runs or may differ.",
        "A comparison has one cause only where all else is published and equal.",
        _comparison_cases,
        (
            "Go through the names of both: set(before) | set(after), without the cause.",
            "before.get(name) is None where it was not published, and so is after.get(name).",
            "Not published on either side counts as a difference: nobody can know.",
        ),
    ),
]  # fmt: skip
