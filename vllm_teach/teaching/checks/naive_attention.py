"""Checks of lesson 01: the softmax of the scores, the causal mask, bytes against FLOPs, and a measurement to design."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "01_naive_attention"


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q kᵀ · scale), one query and one key at a time, in Python floats."""
    rows = []
    for query in q.tolist():
        scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in k.tolist()]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        rows.append([value / sum(exponentials) for value in exponentials])
    return torch.tensor(rows, dtype=torch.float64)


def _attention_weights_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Each row is one query's distribution over the keys: scores times scale, softmax along the keys, sum 1."
    for q_len, kv_len, head_dim, scale in ((3, 3, 4, 0.5), (2, 5, 8, 8**-0.5), (7, 4, 16, 0.1), (1, 9, 2, 1.0)):
        q, k = _normal(generator, q_len, head_dim), _normal(generator, kv_len, head_dim)
        label = f"q_len {q_len}, kv_len {kv_len}, head_dim {head_dim}, scale {scale:.3g}"
        yield Case(label, (q, k, scale), _weights(q, k, scale), rule)
    q, k = 40 * _normal(generator, 3, 4), 40 * _normal(generator, 6, 4)
    rule = (
        "exp overflows above 709 in float64 (88 in float32): subtract each row's maximum first, as torch.softmax does."
    )
    yield Case("large scores", (q, k, 1.0), _weights(q, k, 1.0), rule)


def _causal_mask_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The last query sees every key: query i sees key j where j <= i + kv_len - q_len. True means: may see."
    lengths = [(4, 4), (1, 6), (3, 5), (5, 3), (1, 1), (2, 9)]
    lengths += [tuple(torch.randint(1, 20, (2,), generator=generator).tolist()) for _ in range(3)]
    for q_len, kv_len in lengths:
        rows = [[key <= query + kv_len - q_len for key in range(kv_len)] for query in range(q_len)]
        yield Case(f"q_len {q_len}, kv_len {kv_len}", (q_len, kv_len), torch.tensor(rows), rule)


def _intensity_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "FLOPs: two products of 2·n·n·d. Bytes: q, k, v, out once each (n·d), S and P each written and read (n·n)."
    cases = [(1024, 64, 2), (4096, 128, 2), (1, 64, 4), (16, 256, 4)]
    cases += [(*torch.randint(1, 3000, (2,), generator=generator).tolist(), 2) for _ in range(3)]
    for n, head_dim, width in cases:
        flops = sum(2 * n * n * head_dim for _ in ("S = q kᵀ", "out = P v"))
        numbers = sum(n * head_dim for _ in ("q", "k", "v", "out"))
        numbers += sum(n * n for _ in ("write S", "read S", "write P", "read P"))
        label = f"n {n}, head_dim {head_dim}, {width} bytes a number"
        yield Case(label, (n, head_dim, width), flops / (width * numbers), rule)


class MeasurementLimitError(Exception):
    """More measurements, or a larger n, than the exercise allows."""


MOST_MEASUREMENTS = 6
LARGEST_SIZE = 65_536


def meter(overhead: float, factor: float, power: float) -> Callable[[int], float]:
    """Return cost(n) = overhead + factor · n^power, which can be called six times. A closure: it has nothing to read.

    `cost` raises MeasurementLimitError beyond six calls and for n outside 1 to 65,536.
    """
    calls = 0

    def cost(n: int) -> float:
        nonlocal calls
        calls += 1
        if calls > MOST_MEASUREMENTS:
            raise MeasurementLimitError(f"{MOST_MEASUREMENTS} measurements are allowed: choose fewer sizes.")
        if not 1 <= n <= LARGEST_SIZE:
            raise MeasurementLimitError(f"n={n} cannot be measured: use a size between 1 and {LARGEST_SIZE}.")
        return float(overhead + factor * n**power)

    return cost


def _growth_order_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = (
        "Compare two sizes so large that the fixed overhead is lost beside the rest: a ratio of costs, in logarithms."
    )
    # (overhead in µs, factor, power): a launch cost that hides the growth for small n, as on a real machine.
    for overhead, factor, power in (
        (0.0, 1.0, 1.0),
        (0.0, 3.5, 2.0),
        (5e4, 2e-3, 2.0),
        (2e3, 5.0, 1.0),
        (2e5, 0.01, 2.0),
    ):
        label = f"overhead {overhead:g}, factor {factor:g}"
        yield Case(label, (MadeAnew(partial(meter, overhead, factor, power)),), power, rule)
    for power in (1.5, 3.0, 1 + float(torch.rand((), generator=generator))):
        argument = MadeAnew(partial(meter, 100.0, 0.5, power))
        yield Case(f"overhead 100, factor 0.5, power {power:.3g}", (argument,), power, rule)


CHECKS = [
    Check(
        name="attention_weights",
        lesson=LESSON,
        task="Return softmax(q kᵀ · scale) [q_len, kv_len] for one head: q [q_len, head_dim], k [kv_len, head_dim].",
        lesson_learnt="Every row sums to 1, however large the scores.",
        cases=_attention_weights_cases,
        hints=(
            "Start with the shape: [q_len, head_dim] times what gives [q_len, kv_len]?",
            "Multiply the scores by scale before the softmax, not after.",
            "A query distributes its attention over the keys: softmax runs along the last axis, dim=-1.",
        ),
    ),
    Check(
        name="causal_mask",
        lesson=LESSON,
        task="Return the boolean mask [q_len, kv_len], True where a query may see a key, aligned bottom-right.",
        lesson_learnt="With q_len = 1 it is a row of True: a decoding step sees its whole past.",
        cases=_causal_mask_cases,
        hints=(
            "The q_len queries are the last ones of kv_len tokens. At which position does query 0 stand?",
            "Query i stands at position i + kv_len - q_len and sees itself and everything before it.",
            "torch.arange(kv_len) compared with torch.arange(q_len)[:, None] plus the offset gives the matrix.",
        ),
    ),
    Check(
        name="arithmetic_intensity",
        lesson=LESSON,
        task="Return naive attention's FLOPs per byte for n queries and keys of one head, S and P kept in slow memory.",
        lesson_learnt="As n grows it tends to head_dim / bytes per number: "
        "more tokens never carry it over a GPU's ridge.",
        cases=_intensity_cases,
        hints=(
            "[n, d] times [d, n] costs 2·n·n·d FLOPs: a multiplication and an addition each; twice.",
            "q, k and v are read and out is written: four times n·d numbers.",
            "S is written by the first product and read by the softmax, which writes P; the second product reads P.",
        ),
    ),
    Check(
        name="growth_order",
        lesson=LESSON,
        task="Design a measurement: call cost(n) up to 6 times, n up to 65,536, and return the power of n it grows by, "
        "to within 0.05.",
        lesson_learnt="Small sizes measure the overhead; only large ones measure the growth.",
        cases=_growth_order_cases,
        hints=(
            "If cost is c·n^p, what is cost(2n) / cost(n)?",
            "A power is a slope in a log-log plot: log of the ratio of costs over log of the ratio of sizes.",
            "A fixed overhead bends the curve flat at small n. Measure at the largest sizes you may.",
        ),
        rtol=0.0,
        atol=0.05,
    ),
]
