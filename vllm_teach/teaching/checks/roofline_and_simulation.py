"""Checks of lesson 12: the bytes of a decode step, the side of the ridge, the batch that pays, and a capacity plan."""

import math
from collections.abc import Iterator

import torch

from vllm_teach.teaching.exercises import Case, Check

LESSON = "12_roofline_and_simulation"


def _random(generator: torch.Generator, low: int, high: int, count: int) -> list[int]:
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def _moved(layers: int, matrices: list[tuple[int, int]], kv_width: int, contexts: list[int], size: int) -> int:
    """Walk through the step, layer by layer and key by key."""
    numbers = 0
    for _ in range(layers):
        for rows, columns in matrices:
            numbers += rows * columns
        for context in contexts:
            numbers += 2 * kv_width  # the new token's K and V are written
            numbers += 2 * kv_width * context  # and read again, with all before them
    return numbers * size


def _byte_cases(generator: torch.Generator) -> Iterator[Case]:
    small = [(4, 8), (8, 8)]
    once = "All sequences of a step share one reading of the weights."
    settings = [
        ("weights alone", "Each matrix of each layer is read once.", (3, small, 2, [], 2)),
        ("one sequence", "It reads K and V of every token it sees, its own included.", (1, small, 2, [5], 2)),
        ("its first token", "The new token's K and V are written, and then read with the others.", (1, [], 4, [1], 2)),
        ("two sequences", once, (1, small, 2, [5, 7], 2)),
        ("several layers", "Every layer has a cache of its own.", (4, small, 2, [5, 7], 2)),
        ("float32", "A number has `size` bytes, in the weights and in the cache.", (2, small, 3, [9, 1], 4)),
        ("grouped heads", "The cache is as wide as the KV heads, not as the hidden size.", (2, [(64, 64)], 8, [99], 2)),
    ]  # fmt: skip
    for number in range(3):
        rows, columns, layers, width = _random(generator, 2, 40, 4)
        contexts = _random(generator, 1, 500, 6)
        shape = (layers, [(rows, columns), (columns, rows)], width, contexts, 2)
        settings.append((f"drawn {number + 1}", once, shape))
    for label, rule, arguments in settings:
        yield Case(f"{label}: {arguments}", arguments, _moved(*arguments), rule)


def _shares(flops: float, num_bytes: float, peak: float, bandwidth: float) -> tuple[float, float]:
    """Both start together; the step ends with the slower one."""
    arithmetic, memory = flops / peak, num_bytes / bandwidth
    end = arithmetic if arithmetic > memory else memory
    return arithmetic / end, memory / end


def _ridge_cases(generator: torch.Generator) -> Iterator[Case]:
    left = "Below the ridge memory is busy all the time, and arithmetic waits."
    right = "Above the ridge arithmetic is busy all the time, and memory waits."
    settings = [
        ("far below", left, (1e9, 1e9, 312e12, 2e12)),
        ("far above", right, (4e12, 1e9, 312e12, 2e12)),
        ("on the ridge", "On the ridge both are busy: 1 and 1.", (156e9, 1e9, 312e12, 2e12)),
        ("nothing multiplied", "A copy multiplies nothing: no share of the peak.", (0.0, 5e6, 312e12, 2e12)),
        ("another device", "The ridge is the device's: peak over bandwidth.", (20e9, 1e9, 100e9, 20e9)),
    ]
    for number in range(4):
        flops, moved, peak, bandwidth = (1 + 99 * torch.rand(4, generator=generator, dtype=torch.float64)).tolist()
        rule = left if flops / moved < peak / bandwidth else right
        settings.append((f"drawn {number + 1}", rule, (flops, moved, peak, bandwidth)))
    for label, rule, arguments in settings:
        yield Case(f"{label}: {', '.join(f'{each:.4g}' for each in arguments)}", arguments, _shares(*arguments), rule)


def _paying(peak: float, bandwidth: float, bits: int) -> int:
    """Double the batch until it pays, then halve what lies between."""

    def pays(batch: int) -> bool:
        return 2 * batch * 8 * bandwidth >= peak * bits  # per weight: 2 FLOPs a sequence against bits / 8 bytes

    high = 1
    while not pays(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _batch_cases(generator: torch.Generator) -> Iterator[Case]:
    per_weight = "A weight costs bits / 8 bytes in a step, and 2 FLOPs for each sequence."
    settings = [
        ("16 bits", per_weight, (312e12, 2.039e12, 16)),
        ("8 bits", "With half of the bytes, half of the batch pays for them.", (312e12, 2.039e12, 8)),
        ("4 bits", "With a quarter of the bytes, a quarter of the batch.", (312e12, 2.039e12, 4)),
        ("exactly", "If both take the same time, the reading is paid.", (312e12, 2e12, 16)),
        ("float32", "A weight of 32 bits needs twice the batch of one of 16.", (19.5e12, 1.555e12, 32)),
        ("slow arithmetic", "Where one sequence is enough, the answer is 1.", (10e9, 30e9, 16)),
    ]
    for number in range(3):
        peak, bandwidth = _random(generator, 50, 2000, 1)[0], _random(generator, 1, 8, 1)[0]
        rule = "A batch is a whole number: the first that is not too small."
        settings.append((f"drawn {number + 1}", rule, (peak * 1e12 + 1e9, bandwidth * 1e12, (4, 8, 16)[number])))
    for label, rule, arguments in settings:
        text = f"{label}: {arguments[0]:.4g} FLOP/s, {arguments[1]:.4g} B/s, {arguments[2]} bits"
        yield Case(text, arguments, _paying(*arguments), rule)


def _replicas(trials: list[tuple[int, float]], limit: float, demand: int) -> float:
    """Add replicas until none of them gets more than it can take."""
    missed = [rate for rate, latency in trials if latency > limit]
    safe = [rate for rate, _ in trials if all(rate < each for each in missed)]
    if not safe:
        return math.inf
    count = 1
    while demand > count * max(safe):
        count += 1
    return count


def _plan_cases(generator: torch.Generator) -> Iterator[Case]:
    knee = [(2, 0.4), (4, 0.5), (6, 0.9), (8, 3.0), (10, 9.0)]
    luck = [(2, 0.4), (4, 2.5), (6, 1.8), (8, 5.0)]
    settings = [
        ("one is enough", "A replica takes the highest rate that was kept.", (knee, 1.0, 5)),
        ("exactly full", "A demand of just what they take needs no more of them.", (knee, 1.0, 18)),
        ("one request more", "What is left over needs a replica of its own.", (knee, 1.0, 19)),
        ("on the limit", "A latency of just the limit keeps it.", (knee, 0.9, 12)),
        ("in another order", "Trials come in any order.", ([knee[i] for i in (3, 1, 4, 0, 2)], 1.0, 30)),
        ("a lucky trial", "Above a rate that was missed, one that was kept is luck.", (luck, 2.0, 8)),
        ("a larger limit", "Another limit, another rate.", (knee, 4.0, 30)),
        ("none is kept", "If even the lowest rate misses the limit, no number is enough: math.inf.", (knee, 0.1, 5)),
    ]  # fmt: skip
    for number in range(3):
        rates = sorted(set(_random(generator, 1, 30, 8)))
        latencies = sorted((0.1 + 5 * torch.rand(len(rates), generator=generator, dtype=torch.float64)).tolist())
        order = torch.randperm(len(rates), generator=generator).tolist()
        trials = [(rates[i], latencies[i]) for i in order]
        demand = _random(generator, 40, 200, 1)[0]
        rule = "Round up: a part of a replica cannot be bought."
        settings.append((f"drawn {number + 1}", rule, (trials, latencies[len(rates) // 2], demand)))
    for label, rule, arguments in settings:
        trials, limit, demand = arguments
        text = f"{label}: limit {limit:.3g} s, {demand} requests a second"
        yield Case(text, arguments, _replicas(trials, limit, demand), rule)


CHECKS = [
    Check(
        name="decode_bytes",
        lesson=LESSON,
        task="Return the bytes of a decode step: each of `layers` layers reads its `matrices` once and, for each "
        "sequence, writes K and V of the new token and reads those of all tokens in its context.",
        lesson_learnt="Weights are paid once a step, the cache once a sequence: so batches pay, up to a point.",
        cases=_byte_cases,
        hints=(
            "Count numbers, not bytes, for one layer; multiply by layers and by size at the end.",
            "The matrices have sum(rows * columns) numbers, however many sequences there are.",
            "K and V of a token are 2 * kv_width numbers; a sequence writes them once and reads them `context` times.",
        ),
    ),
    Check(
        name="busy_shares",
        lesson=LESSON,
        task="An operator does `flops` and moves `num_bytes`, both at once, as fast as the device can. Return (the "
        "share of its time in which arithmetic is busy, the share in which memory is).",
        lesson_learnt="One of the two is always 1, and which one says on which side of the ridge the operator is.",
        cases=_ridge_cases,
        hints=(
            "How long does the arithmetic take alone, and how long the memory?",
            "The operator takes as long as the slower of the two.",
            "Divide each of the two times by the larger one.",
        ),
    ),
    Check(
        name="paying_batch",
        lesson=LESSON,
        task="Return the smallest batch whose arithmetic takes at least as long as reading weights of `bits` bits.",
        lesson_learnt="Below that batch another sequence costs next to nothing; above it each costs its full price.",
        cases=_batch_cases,
        hints=(
            "Look at one weight alone: how many bytes, how many FLOPs for each sequence?",
            "bits / 8 / bandwidth seconds to read it, 2 * batch / peak seconds to multiply with it.",
            "Solve for batch, and round up: math.ceil(peak * bits / (16 * bandwidth)).",
        ),
    ),
    Check(
        name="replicas_for",
        lesson=LESSON,
        task="trials are (rate, p99) of one replica, in any order. Return how many replicas serve `demand` requests a "
        "second, split evenly, with a p99 of at most `limit`: math.inf if no rate was kept.",
        lesson_learnt="The knee of one replica is the unit in which capacity is bought.",
        cases=_plan_cases,
        hints=(
            "Sort the trials by rate and walk upwards until the first one that is above the limit.",
            "The last rate before it is what a replica takes; rates beyond do not count, even if they were lucky.",
            "math.ceil(demand / rate), or math.inf if there was none.",
        ),
    ),
]
