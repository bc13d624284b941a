"""Lesson 13's checks: the right answers pass, and each known-wrong one is rejected."""

import statistics

import pytest

from vllm_teach.teaching import check
from vllm_teach.validation.audit.finding import arithmetic, counted, modelled


def judge_ratio(low, high, ratios, *, centre=statistics.median, spread=True, strict=False, closed=True):
    if spread and (min(ratios) < 1 if strict else min(ratios) <= 1):
        return "fails"
    middle = centre(ratios)
    if not spread and middle <= 1:
        return "fails"
    inside = low <= middle <= high if closed else low < middle < high
    return "holds" if inside else "direction only"


def implied_batch(before_mb, after_mb, heads, length, element_bytes):
    return (before_mb - after_mb) * 1e6 / (2 * heads * length**2 * element_bytes)


def wasted(lengths, block_size):
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    return (slots - sum(lengths)) / slots


def waste_finding(lengths, block_size, *, value=wasted, make=counted, name="slots wasted", setting=None):
    told = f"{len(lengths)} sequences, blocks of {block_size}" if setting is None else setting
    return make(name, value(lengths, block_size), "", told)


def other_causes(before, after, cause):
    names = sorted({*before, *after} - {cause})
    return [name for name in names if before.get(name) is None or before.get(name) != after.get(name)]


RIGHT = {
    "judge_ratio": [judge_ratio],
    "implied_batch": [implied_batch],
    "waste_finding": [waste_finding],
    "other_causes": [other_causes, lambda b, a, c: set(other_causes(b, a, c))],
}
WRONG = {
    "judge_ratio": {
        "ignores the spread": lambda low, high, r: judge_ratio(low, high, r, spread=False),
        "the mean": lambda low, high, r: judge_ratio(low, high, r, centre=statistics.mean),
        "the best round": lambda low, high, r: judge_ratio(low, high, r, centre=max),
        "the worst round": lambda low, high, r: judge_ratio(low, high, r, centre=min),
        "the first round": lambda low, high, r: judge_ratio(low, high, r, centre=lambda x: x[0]),
        "the middle round, unsorted": lambda low, high, r: judge_ratio(low, high, r, centre=lambda x: x[len(x) // 2]),
        "a round of exactly 1 has an effect": lambda low, high, r: judge_ratio(low, high, r, strict=True),
        "open ends": lambda low, high, r: judge_ratio(low, high, r, closed=False),
        "any round inside": lambda low, high, r: "holds" if any(low <= x <= high for x in r) else "fails",
        "no direction": lambda low, high, r: "holds" if judge_ratio(low, high, r) == "holds" else "fails",
        "booleans": lambda low, high, r: judge_ratio(low, high, r) == "holds",
        "capitals": lambda low, high, r: judge_ratio(low, high, r).upper(),
    },
    "implied_batch": {
        "one matrix": lambda b, a, n, s, e: 2 * implied_batch(b, a, n, s, e),
        "the first figure alone": lambda b, a, n, s, e: implied_batch(b, 0, n, s, e),
        "mebibytes": lambda b, a, n, s, e: implied_batch(b, a, n, s, e) * 2**20 / 1e6,
        "no heads": lambda b, a, n, s, e: implied_batch(b, a, 1, s, e),
        "half precision always": lambda b, a, n, s, e: implied_batch(b, a, n, s, 2),
        "linear in length": lambda b, a, n, s, e: implied_batch(b, a, n, s, e) * s,
        "rounded": lambda b, a, n, s, e: round(implied_batch(b, a, n, s, e)),
        "the ratio": lambda b, a, n, s, e: b / a if a else 0.0,
        "the sum": lambda b, a, n, s, e: implied_batch(b + a, 0, n, s, e),
    },
    "waste_finding": {
        "a bare number": wasted,
        "another name": lambda n, b: waste_finding(n, b, name="waste"),
        "modelled": lambda n, b: waste_finding(n, b, make=modelled),
        "arithmetic": lambda n, b: waste_finding(n, b, make=arithmetic),
        "no setting": lambda n, b: waste_finding(n, b, setting=""),
        "a setting without the block size": lambda n, b: waste_finding(n, b, setting=f"{len(n)} sequences"),
        "a setting without the number": lambda n, b: waste_finding(n, b, setting=f"blocks of {b}"),
        "a mean of shares": lambda n, b: waste_finding(
            n, b, value=lambda n, b: statistics.mean(wasted([x], b) for x in n)
        ),
        "one block too many when full": lambda n, b: waste_finding(
            n, b, value=lambda n, b: 1 - sum(n) / sum((x // b + 1) * b for x in n)
        ),
        "over the tokens": lambda n, b: waste_finding(n, b, value=lambda n, b: wasted(n, b) / (1 - wasted(n, b))),
        "what is used": lambda n, b: waste_finding(n, b, value=lambda n, b: 1 - wasted(n, b)),
        "half a block each": lambda n, b: waste_finding(n, b, value=lambda n, b: b / 2 * len(n) / sum(n)),
    },
    "other_causes": {
        "with the cause": lambda b, a, c: sorted({*other_causes(b, a, c), c}),
        "the first alone": lambda b, a, c: other_causes(b, a, c)[:1],
        "names of the first run": lambda b, a, c: [n for n in b if n != c and b[n] != a.get(n)],
        "unknown is equal": lambda b, a, c: [n for n in sorted({*b, *a}) if n != c and b.get(n) != a.get(n)],
        "common names alone": lambda b, a, c: [n for n in b if n in a and n != c and b[n] != a[n]],
        "zero is unknown": lambda b, a, c: [
            n for n in sorted({*b, *a}) if n != c and (not b.get(n) or b.get(n) != a.get(n))
        ],
        "what is equal": lambda b, a, c: [n for n in b if n not in other_causes(b, a, c) and n != c],
        "a count": lambda b, a, c: len(other_causes(b, a, c)),
        "every name twice": lambda b, a, c: other_causes(b, a, c) * 2,
        "nothing": lambda b, a, c: [],
    },
}


@pytest.mark.parametrize(
    ("name", "answer"),
    [(name, answer) for name, answers in RIGHT.items() for answer in answers],
)
def test_right_answers_pass(name, answer, capsys):
    assert getattr(check, name)(answer).solved, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "mistake", "answer"),
    [(name, mistake, answer) for name, wrong in WRONG.items() for mistake, answer in wrong.items()],
)
def test_wrong_answers_are_rejected_with_a_rule_and_a_hint(name, mistake, answer):
    result = getattr(check, name)(answer)
    assert result.status in ("wrong", "error"), f"{mistake} passed"
    assert "Rule:" in result.message or result.status == "error"
    assert "hint" in result.message.lower()


def test_articles_rows_imply_a_batch_of_eight():
    assert 7.5 < implied_batch(3200, 1100, 16, 2048, 2) < 8
