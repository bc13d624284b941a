"""Lesson 02's checks: the right answers pass, and each known-wrong one is rejected."""

# ruff: noqa: E741 - l is the running sum's name in the papers

import math

import pytest
import torch

from vllm_teach.teaching import check


def step(m, l, acc, scores, values, *, rescale_l=True, rescale_acc=True, guard=True, tile_only=False, keep_m=False):
    """One step of the online softmax with switches for what can go wrong."""
    m_new = scores.amax(-1) if tile_only else m if keep_m else torch.maximum(m, scores.amax(-1))
    base = torch.where(m_new.isinf(), 0.0, m_new) if guard else m_new
    alpha = torch.exp(m - base)
    p = torch.exp(scores - base[:, None])
    old_l = alpha * l if rescale_l else l
    old_acc = alpha[:, None] * acc if rescale_acc else acc
    return m_new, old_l + p.sum(-1), old_acc + p @ values


def update(m, l, acc, scores, values):
    return step(m, l, acc, scores, values)


def in_place_update(m, l, acc, scores, values):
    m_new, l_new, acc_new = step(m, l, acc, scores, values)
    acc.copy_(acc_new)
    return m_new, l_new, acc


def finished_update(m, l, acc, scores, values):
    m, l, acc = step(m, l, acc, scores, values)
    return m, l, acc / l.clamp(min=1e-300)[:, None]


def half_update(m, l, acc, scores, values):
    p, v = torch.exp(scores - torch.maximum(m, scores.amax(-1))[:, None]).half(), values.half()
    right = step(m, l, acc, scores, values)
    first = step(m, l, acc, scores, values * 0)
    return right[0], right[1], first[2] + (p @ v).double().nan_to_num()


def inverse_alpha(m, l, acc, scores, values):
    m_new = torch.maximum(m, scores.amax(-1))
    alpha, p = torch.exp(m_new - m), torch.exp(scores - m_new[:, None])
    return m_new, alpha * l + p.sum(-1), alpha[:, None] * acc + p @ values


def no_maximum(m, l, acc, scores, values):
    p = torch.exp(scores)
    return torch.maximum(m, scores.amax(-1)), l + p.sum(-1), acc + p @ values


def one_maximum(m, l, acc, scores, values):
    m_new = torch.maximum(m, scores.max().expand_as(m))
    alpha, p = torch.exp(m - m_new), torch.exp(scores - m_new[:, None])
    return m_new, alpha * l + p.sum(-1), alpha[:, None] * acc + p @ values


def erases_the_past(m, l, acc, scores, values):
    """Empties a row when the tile hides all of its keys."""
    m_new, l_new, acc_new = step(m, l, acc, scores, values)
    hidden = scores.amax(-1).isinf()
    return (
        torch.where(hidden, -math.inf, m_new),
        torch.where(hidden, 0.0, l_new),
        torch.where(hidden[:, None], 0.0, acc_new),
    )


def skips_for_all_rows(m, l, acc, scores, values):
    """Leaves every row as it was when the tile hides all keys of one."""
    if scores.amax(-1).isinf().any():
        return m.clone(), l.clone(), acc.clone()
    return step(m, l, acc, scores, values)


def guards_only_the_first_row(m, l, acc, scores, values):
    return step(m, l, acc, scores, values, guard=bool(torch.maximum(m, scores.amax(-1))[0].isinf()))


def update_with_where(m, l, acc, scores, values):
    """Right, with the empty rows set apart instead of a replaced maximum."""
    m_new = torch.maximum(m, scores.amax(-1))
    alpha = torch.where(m == m_new, 1.0, torch.exp(m - m_new))
    p = torch.where(m_new[:, None].isinf(), 0.0, torch.exp(scores - m_new[:, None]))
    return m_new, alpha * l + p.sum(-1), alpha[:, None] * acc + p @ values


def empty_as_a_whole(left, right):
    """Treats a part as empty only when all of its rows are."""
    if left[0].isinf().all():
        return right
    if right[0].isinf().all():
        return left
    return merge(left, right, guard=False)


def empty_by_the_first_row(left, right):
    if left[0][0].isinf():
        return right
    if right[0][0].isinf():
        return left
    return merge(left, right, guard=False)


def empty_where_any_row_is(left, right):
    if left[0].isinf().any():
        return right
    if right[0].isinf().any():
        return left
    return merge(left, right)


def merge(left, right, *, guard=True, scale_l=True, scale_acc=True):
    m = torch.maximum(left[0], right[0])
    base = torch.where(m.isinf(), 0.0, m) if guard else m
    a, b = torch.exp(left[0] - base), torch.exp(right[0] - base)
    sums = a * left[1] + b * right[1] if scale_l else left[1] + right[1]
    return m, sums, a[:, None] * left[2] + b[:, None] * right[2] if scale_acc else left[2] + right[2]


def merge_from_the_left(left, right):
    """Right only while the left maximum is the larger one."""
    b = torch.exp(right[0] - left[0]).nan_to_num(0.0)
    return left[0], left[1] + b * right[1], left[2] + b[:, None] * right[2]


def merge_in_place(left, right):
    merged = merge(left, right)
    left[1].copy_(merged[1])
    return merged


def merge_outputs(left, right):
    """Averages the two finished outputs, as if both parts had seen the same weight."""
    m, l, _ = merge(left, right)
    outputs = [part[2] / part[1].clamp(min=1e-300)[:, None] for part in (left, right)]
    return m, l, l[:, None] * (outputs[0] + outputs[1]) / 2


def tiles(q_len, kv_len, tile_q, tile_k, *, shift=None, ceil=True, last=True, clip=True):
    shift = kv_len - q_len if shift is None else shift
    total = 0
    for first in range(0, q_len if ceil else q_len - tile_q + 1, tile_q):
        query = min(first + tile_q, q_len) - 1 if last else first
        visible = min(kv_len, query + shift + 1)
        visible = max(0, visible) if clip else visible
        total += -(-visible // tile_k) if ceil else visible // tile_k
    return total


def stops(add):
    total = add(0.0)
    while add(total) != total:
        total *= 2
    return total


def stops_by_halving(add):
    """Right: a search over the exponent, which tries totals far beyond a small dtype's range."""
    step_size, low, high = add(0.0), 0, 60
    while low < high:
        middle = (low + high) // 2
        unchanged = add(step_size * 2.0**middle) == step_size * 2.0**middle
        low, high = (low, middle) if unchanged else (middle + 1, high)
    return step_size * 2.0**low


def stops_one_by_one(add):
    total = add(0.0)
    while add(total) != total:
        total = add(total)
    return total


RIGHT = {
    "online_softmax_update": [update, update_with_where],
    "merge_states": [merge, lambda a, b: merge(b, a)],
    "tiles_visited": [tiles],
    "sum_that_stops": [stops, stops_by_halving],
}
WRONG = {
    "online_softmax_update": {
        "acc not rescaled": lambda *a: step(*a, rescale_acc=False),
        "l not rescaled": lambda *a: step(*a, rescale_l=False),
        "nothing rescaled": lambda *a: step(*a, rescale_acc=False, rescale_l=False),
        "maximum of the tile only": lambda *a: step(*a, tile_only=True),
        "maximum not updated": lambda *a: step(*a, keep_m=True),
        "NaN in a masked row": lambda *a: step(*a, guard=False),
        "NaN turned to 0 in m too": lambda *a: tuple(x.nan_to_num(neginf=0.0) for x in step(*a)),
        "rescaled the wrong way": inverse_alpha,
        "no maximum at all": no_maximum,
        "one maximum for all rows": one_maximum,
        "acc already divided": finished_update,
        "float16 products": half_update,
        "float32 returned": lambda *a: tuple(x.float() for x in step(*a)),
        "float32 inside": lambda *a: tuple(x.double() for x in step(*(x.float() for x in a))),
        "inputs changed": in_place_update,
        "l and m swapped": lambda *a: (step(*a)[1], step(*a)[0], step(*a)[2]),
        "l forgotten": lambda *a: (step(*a)[0], step(*a)[2]),
        "acc alone": lambda *a: step(*a)[2],
        "old state dropped": lambda m, l, acc, s, v: step(torch.full_like(m, -torch.inf), l * 0, acc * 0, s, v),
        "tile dropped": lambda m, l, acc, s, v: (m.clone(), l.clone(), acc.clone()),
        "a hidden tile erases a row's past": erases_the_past,
        "a hidden tile stops all rows": skips_for_all_rows,
        "guarded by the first row only": guards_only_the_first_row,
        "a tile of 2": lambda m, l, acc, s, v: step(m, l, acc, s[:, :2], v[:2]),
    },
    "merge_states": {
        "plain sums": lambda a, b: merge(a, b, scale_l=False, scale_acc=False),
        "l not rescaled": lambda a, b: merge(a, b, scale_l=False),
        "acc not rescaled": lambda a, b: merge(a, b, scale_acc=False),
        "NaN of two empty parts": lambda a, b: merge(a, b, guard=False),
        "NaN hidden, m too": lambda a, b: tuple(x.nan_to_num(neginf=-1e30) for x in merge(a, b)),
        "empty only as a whole": empty_as_a_whole,
        "empty by its first row": empty_by_the_first_row,
        "empty where any row is": empty_where_any_row_is,
        "the left maximum": merge_from_the_left,
        "the smaller maximum": lambda a, b: (torch.minimum(a[0], b[0]), *merge(a, b)[1:]),
        "sum of maxima": lambda a, b: (a[0] + b[0], *merge(a, b)[1:]),
        "average of outputs": merge_outputs,
        "left only": lambda a, b: tuple(x.clone() for x in a),
        "inputs changed": merge_in_place,
        "float16": lambda a, b: tuple(x.half().double() for x in merge(a, b)),
        "acc alone": lambda a, b: merge(a, b)[2],
    },
    "tiles_visited": {
        "top-left": lambda q, k, tq, tk: tiles(q, k, tq, tk, shift=0),
        "all tiles": lambda q, k, tq, tk: -(-q // tq) * -(-k // tk),
        "half of all": lambda q, k, tq, tk: -(-q // tq) * -(-k // tk) // 2,
        "triangle": lambda q, k, tq, tk: (-(-q // tq)) * (-(-q // tq) + 1) // 2,
        "ragged tiles dropped": lambda q, k, tq, tk: tiles(q, k, tq, tk, ceil=False),
        "first query decides": lambda q, k, tq, tk: tiles(q, k, tq, tk, last=False),
        "one key too few": lambda q, k, tq, tk: tiles(q, k, tq, tk, shift=k - q - 1),
        "one key too many": lambda q, k, tq, tk: tiles(q, k, tq, tk, shift=k - q + 1),
        "negative counts": lambda q, k, tq, tk: tiles(q, k, tq, tk, clip=False),
        "tile sizes swapped": lambda q, k, tq, tk: tiles(q, k, tk, tq),
        "lengths swapped": lambda q, k, tq, tk: tiles(k, q, tq, tk),
        "skipped ones": lambda q, k, tq, tk: -(-q // tq) * -(-k // tk) - tiles(q, k, tq, tk),
        "visible pairs": lambda q, k, tq, tk: tiles(q, k, 1, 1),
    },
    "sum_that_stops": {
        "one by one": stops_one_by_one,
        "the last that still grows": lambda add: stops(add) / 2,
        "one doubling too many": lambda add: stops(add) * 2,
        "in steps, not as a sum": lambda add: stops(add) / add(0.0),
        "the step before": lambda add: stops(add) - add(0.0),
        "always float16": lambda add: 2048.0,
        "float16 for any step": lambda add: 2048.0 * add(0.0),
        "the largest float16": lambda add: 65504.0,
        "read, not tried": lambda add: add.step * 2.0 ** {torch.float16: 11, torch.float32: 24}[add.dtype],
        "the gap": lambda add: 2 * add(0.0),
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
    assert getattr(check, name)(answer).status in ("wrong", "error")


@pytest.mark.parametrize("name", ["online_softmax_update", "merge_states"])
def test_the_task_says_the_dtype_and_what_empty_means(name):
    task = getattr(check, name).task
    assert "in the inputs' dtype" in task
    assert "m = -inf, l = 0, acc = 0" in task


def test_a_total_beyond_the_hidden_dtypes_range_comes_back_unchanged():
    assert "A total too large for the hidden dtype comes back unchanged." in check.sum_that_stops.task
    (add,) = check.sum_that_stops.cases()[0].fresh_arguments()  # float16, step 1
    assert [add(1.0), add(2.0**11), add(2.0**20)] == [2.0, 2.0**11, 2.0**20]


def test_what_the_learner_gets_has_nothing_to_read():
    for case in check.sum_that_stops.cases():
        (given,) = case.fresh_arguments()
        assert vars(given) == {}
