"""Checks of lesson 02: a step of the online softmax, a merge of two partial results, tiles visited, a sum to probe."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "02_online_softmax_and_tiling"
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _state_of(scores: torch.Tensor, values: torch.Tensor) -> State:
    """(m, l, acc) after all of these keys, straight from the definition, one row at a time in Python floats.

    scores [q_len, keys], values [keys, head_dim] -> m [q_len], l [q_len], acc [q_len, head_dim], float64.
    """
    head_dim = values.shape[1]
    maxima, sums, accumulators = [], [], []
    for row in scores.tolist():
        m = max(row, default=-math.inf)
        weights = [math.exp(score - m) if score > -math.inf else 0.0 for score in row]
        maxima.append(m)
        sums.append(math.fsum(weights))
        accumulators.append(
            [
                math.fsum(w * value[d] for w, value in zip(weights, values.tolist(), strict=True))
                for d in range(head_dim)
            ]
        )
    return tuple(torch.tensor(part, dtype=torch.float64) for part in (maxima, sums, accumulators))  # type: ignore[return-value]


def _draw(generator: torch.Generator, q_len: int, keys: int, head_dim: int, size: float) -> tuple[torch.Tensor, ...]:
    scores = size * torch.randn((q_len, keys), generator=generator, dtype=torch.float64)
    return scores, torch.randn((keys, head_dim), generator=generator, dtype=torch.float64)


def _update_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "When the maximum moves from m to m_new, all that was summed before is worth exp(m - m_new) of what it was."
    for q_len, seen, tile, head_dim in ((1, 2, 2, 3), (4, 6, 3, 8), (3, 5, 1, 4), (2, 16, 16, 5)):
        scores, values = _draw(generator, q_len, seen + tile, head_dim, 2.0)
        state = _state_of(scores[:, :seen], values[:seen])
        label = f"{q_len} queries, {seen} keys seen, tile of {tile}"
        yield Case(label, (*state, scores[:, seen:], values[seen:]), _state_of(scores, values), rule)
    scores, values = _draw(generator, 3, 8, 4, 1.0)
    up = scores + torch.tensor([0.0] * 4 + [30.0] * 4, dtype=torch.float64)
    down = scores - torch.tensor([0.0] * 4 + [30.0] * 4, dtype=torch.float64)
    for label, moved in (("the tile holds the new maximum", up), ("the old maximum stays", down)):
        yield Case(
            label, (*_state_of(moved[:, :4], values[:4]), moved[:, 4:], values[4:]), _state_of(moved, values), rule
        )
    large = 800 * scores
    rule = "exp(800) overflows: every exponent is a score minus the new maximum, and so never above 0."
    yield Case(
        "large scores", (*_state_of(large[:, :4], values[:4]), large[:, 4:], values[4:]), _state_of(large, values), rule
    )
    rule = "The first tile starts from m = -inf, l = 0, acc = 0."
    empty = _state_of(scores[:, :0], values[:0])
    empty = (empty[0], empty[1], torch.zeros(3, 4, dtype=torch.float64))
    yield Case("the first tile", (*empty, scores, values), _state_of(scores, values), rule)
    rule = (
        "Where the mask hides every key so far, both maxima are -inf and -inf - (-inf) is NaN: such a row stays empty."
    )
    masked = scores.clone()
    masked[1] = -math.inf
    yield Case("row 1 sees no key", (*empty, masked, values), _state_of(masked, values), rule)
    rule = "Each row has a past and a tile of its own: what the mask hides from one row changes nothing in another."
    scores, values = _draw(generator, 4, 8, 4, 1.0)
    scores[0] = -math.inf  # row 0 sees nothing at all, row 1 nothing yet, row 2 nothing more, row 3 everything
    scores[1, :4] = -math.inf
    scores[2, 4:] = -math.inf
    parts = (*_state_of(scores[:, :4], values[:4]), scores[:, 4:], values[4:])
    yield Case("rows that see no key before, in or after the tile", parts, _state_of(scores, values), rule)
    rule = "A tile whose keys are all hidden adds exp(-inf) = 0 to l and acc, and leaves the maximum: the past stays."
    hidden = scores[3:].clone()
    hidden[:, 4:] = -math.inf
    parts = (*_state_of(hidden[:, :4], values[:4]), hidden[:, 4:], values[4:])
    yield Case("keys seen, then a tile all hidden", parts, _state_of(hidden, values), rule)


def _merge_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Both parts are brought to the larger of the two maxima, l and acc alike, and then added."
    for q_len, first, second, head_dim in ((1, 1, 1, 2), (3, 4, 7, 5), (5, 9, 2, 8)):
        scores, values = _draw(generator, q_len, first + second, head_dim, 3.0)
        parts = _state_of(scores[:, :first], values[:first]), _state_of(scores[:, first:], values[first:])
        yield Case(f"{first} keys and {second} keys", parts, _state_of(scores, values), rule)
    scores, values = _draw(generator, 2, 6, 3, 900.0)
    parts = _state_of(scores[:, :3], values[:3]), _state_of(scores[:, 3:], values[3:])
    yield Case("large scores", parts, _state_of(scores, values), rule)
    rule = "A part that has seen no key (m = -inf) changes nothing, and two of them stay empty: 0 and -inf, never NaN."
    scores, values = _draw(generator, 3, 4, 5, 1.0)
    full = _state_of(scores, values)
    nothing = _state_of(torch.full_like(scores, -math.inf), values)
    yield Case("an empty part on the left", (nothing, full), full, rule)
    yield Case("an empty part on the right", (full, nothing), full, rule)
    yield Case("two empty parts", (nothing, nothing), nothing, rule)
    rule = "Each row decides for itself: one row may be empty in both parts while another has keys in each."
    scores, values = _draw(generator, 4, 6, 3, 1.0)
    scores[0] = -math.inf
    scores[1, :3] = -math.inf
    scores[3, 3:] = -math.inf
    parts = _state_of(scores[:, :3], values[:3]), _state_of(scores[:, 3:], values[3:])
    yield Case("rows empty in both parts, the left, none, the right", parts, _state_of(scores, values), rule)


def _tiles_visited_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "A tile is computed if its last query sees its first key: key <= query + kv_len - q_len. Ragged tiles count."
    sizes = [
        (4, 4, 2, 2),
        (8, 8, 4, 2),
        (8, 8, 2, 4),
        (1, 10, 4, 4),
        (3, 9, 2, 4),
        (7, 7, 3, 2),
        (9, 4, 2, 3),
        (5, 5, 8, 8),
    ]
    sizes += [
        (
            *torch.randint(1, 40, (2,), generator=generator).tolist(),
            *torch.randint(1, 9, (2,), generator=generator).tolist(),
        )
        for _ in range(6)
    ]
    for q_len, kv_len, tile_q, tile_k in sizes:
        # Counted from the mask: every tile that holds a visible pair.
        seen = {
            (query // tile_q, key // tile_k)
            for query in range(q_len)
            for key in range(kv_len)
            if key <= query + kv_len - q_len
        }
        label = f"q_len {q_len}, kv_len {kv_len}, tiles of {tile_q} x {tile_k}"
        yield Case(label, (q_len, kv_len, tile_q, tile_k), len(seen), rule)


class AddLimitError(Exception):
    """More additions than the exercise allows."""


MOST_ADDITIONS = 60


def adder(dtype: torch.dtype, step: float) -> Callable[[float], float]:
    """Return add(total) = total + step, rounded as `dtype` rounds. A closure: it has nothing to read.

    A total beyond the dtype's range comes back as it is: from the answer on no power of two changes, as a search by
    halving expects. `add` raises AddLimitError beyond 60 calls.
    """
    calls = 0

    def add(total: float) -> float:
        nonlocal calls
        calls += 1
        if calls > MOST_ADDITIONS:
            raise AddLimitError(f"{MOST_ADDITIONS} additions are allowed: try totals that lie further apart.")
        if abs(total) > torch.finfo(dtype).max:
            return total
        return float(torch.tensor(total, dtype=dtype) + step)

    return add


def _sum_that_stops_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "A dtype with p significant bits adds a step to a sum of up to 2**p steps; from there on it rounds it away."
    bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
    settings = [(dtype, 1.0) for dtype in bits] + [(torch.float16, 16.0), (torch.bfloat16, 0.25)]
    settings.append((torch.float32, 2.0 ** int(torch.randint(1, 8, (), generator=generator))))
    for number, (dtype, step) in enumerate(settings, start=1):
        yield Case(
            f"hidden dtype {number}, step {step:g}",
            (MadeAnew(partial(adder, dtype, step)),),
            step * 2.0 ** bits[dtype],
            rule,
        )


CHECKS = [
    Check(
        name="tiles_visited",
        lesson=LESSON,
        task="Return how many tiles of tile_q x tile_k causal attention (bottom-right) has to compute.",
        lesson_learnt="For long sequences it is about half of all tiles: the rest is never read.",
        cases=_tiles_visited_cases,
        hints=(
            "Draw it for q_len = kv_len = 4 with 2 x 2 tiles: three of the four tiles hold a visible pair.",
            "A row of tiles starts at query r; its last query is min(r + tile_q, q_len) - 1.",
            "That query sees min(kv_len, query + kv_len - q_len + 1) keys; if that is below 1, it sees none.",
            "So many keys lie in that number divided by tile_k, rounded up, tiles.",
        ),
    ),
    Check(
        name="online_softmax_update",
        lesson=LESSON,
        task="Return the new (m, l, acc), in the inputs' dtype, after one more tile of scores [q_len, tile] and values "
        "[tile, head_dim]. A row that has seen no key has m = -inf, l = 0, acc = 0.",
        lesson_learnt="Softmax in one pass: no row of scores was ever held whole.",
        cases=_update_cases,
        hints=(
            "m_new is the larger of m and the tile's row maximum. Write exp(score - m_new) for the tile's own scores.",
            "l and acc were summed relative to the old m: multiply both by exp(m - m_new) before you add.",
            "acc has one more axis than m: exp(m - m_new)[:, None].",
            "If m_new is -inf, use 0 in its place inside the exponents: exp(-inf - 0) is 0, exp(-inf + inf) is NaN.",
        ),
    ),
    Check(
        name="merge_states",
        lesson=LESSON,
        task="Return the (m, l, acc) of all keys, in the inputs' dtype, given those of two disjoint parts, "
        "each a tuple (m, l, acc). An empty part is m = -inf, l = 0, acc = 0.",
        lesson_learnt="The order does not matter, so parts of one row can be computed at the same time (split-KV).",
        cases=_merge_cases,
        hints=(
            "It is the update again, but now both sides have been summed relative to a maximum of their own.",
            "m = maximum(m_a, m_b); each side's l and acc are multiplied by exp(its own m - m).",
            "Two empty parts: m is -inf, and -inf - (-inf) is NaN. Subtract 0 where m is -inf.",
        ),
    ),
    Check(
        name="sum_that_stops",
        lesson=LESSON,
        task="Return the smallest running sum that add(total) no longer changes, with at most 60 additions. "
        "A total too large for the hidden dtype comes back unchanged.",
        lesson_learnt="Of keys with equal scores, l in bfloat16 counts 256, in float16 2,048, in float32 16,777,216.",
        cases=_sum_that_stops_cases,
        hints=(
            "add(0.0) tells you the step. Adding it one by one takes far too many calls: which totals are worth a try?",
            "The gap between neighbouring floats doubles at each power of two, so only step * 2**k can be the first.",
            "Double total until add(total) == total.",
        ),
    ),
]
