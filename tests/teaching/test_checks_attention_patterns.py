"""Lesson 04's checks: the right answers pass, and each known-wrong one is rejected."""

import pytest
import torch

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow
from vllm_teach.teaching import check


def sees(q_pos, k_pos, sinks, window, *, own=0, causal_sinks=True, causal_window=True):
    """The rule with switches for what can go wrong."""
    past = k_pos <= q_pos
    sink = (k_pos < sinks) & (past if causal_sinks else torch.ones_like(past))
    near = q_pos - k_pos < window + own
    return sink | (near & past if causal_window else near)


def kinds(mask, tile, *, dtype=torch.int64, ragged=True, any_is=1, all_is=2):
    q_len, kv_len = mask.shape
    if not ragged:
        q_len, kv_len = q_len // tile * tile, kv_len // tile * tile
    rows = []
    for row in range(0, q_len, tile):
        pieces = [mask[row : row + tile, column : column + tile] for column in range(0, kv_len, tile)]
        rows.append([all_is if piece.all() else any_is if piece.any() else 0 for piece in pieces])
    return torch.tensor(rows, dtype=dtype)


def kinds_by_density(mask, tile):
    """Divides by a whole tile, so that a short one never counts as FULL."""
    q_len, kv_len = mask.shape
    rows = [
        [float(mask[r : r + tile, c : c + tile].sum()) / tile**2 for c in range(0, kv_len, tile)]
        for r in range(0, q_len, tile)
    ]
    shares = torch.tensor(rows)
    return (shares > 0).long() + (shares == 1).long()


def kinds_by_corners(mask, tile):
    """Looks at the corners of a tile alone, which is right for a causal mask and no other."""
    q_len, kv_len = mask.shape
    rows = []
    for r in range(0, q_len, tile):
        row = []
        for c in range(0, kv_len, tile):
            piece = mask[r : r + tile, c : c + tile]
            row.append(int(piece[-1, 0]) + int(piece[0, -1]))
        rows.append(row)
    return torch.tensor(rows)


def either(a, b):
    both_empty = torch.where(a == 0, b, torch.where(b == 0, a, 3))
    return torch.where((a == 2) | (b == 2), 2, both_empty)


def either_by_maximum(a, b):
    return torch.maximum(a, b)


def either_partial(a, b):
    """Takes two PARTIAL tiles for PARTIAL."""
    return torch.where((a == 1) & (b == 1), 1, either(a, b))


def both(a, b):
    """The rule of a & b."""
    return torch.where(a == 0, 0, torch.where(b == 0, 0, torch.where(a == 2, b, torch.where(b == 2, a, 3))))


def design(weights, tile, budget, *, causal=True, diagonal=True, spend=0, transposed=False, largest=True, by="sum"):
    """The heaviest tiles, with switches for what can go wrong."""
    n = len(weights)
    blocks = -(-n // tile)
    layout = torch.zeros(blocks, blocks)
    for row in range(blocks):
        for column in range(blocks):
            piece = weights[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            layout[row, column] = float(piece.sum() if by == "sum" else piece.max())
    if not largest:
        layout = torch.where(torch.ones_like(layout).tril() > 0, 1 - layout / n, 0.0)
    order = layout.clone()
    if diagonal:
        order.fill_diagonal_(2.0 * n)
    chosen = torch.zeros(blocks * blocks, dtype=torch.bool)
    chosen[order.flatten().topk(budget + spend).indices] = True
    chosen = chosen.view(blocks, blocks)
    pattern = BlockSparsePattern(chosen.T if transposed else chosen, tile)
    return pattern & Causal() if causal else pattern


def window_within(weights, tile, budget, sinks=0):
    """The widest window, with so many sinks, that the budget allows."""
    n = len(weights)
    for width in range(n, 0, -1):
        pattern = LocalWindow(width - 1) | GlobalTokens(sinks)
        if int((pattern.tile_map(n, n, tile, tile) != 0).sum()) <= budget:
            return pattern
    return LocalWindow(0)


RIGHT = {
    "sees_sinks_and_window": [
        sees,
        lambda q, k, s, w: (GlobalTokens(s) | LocalWindow(w - 1)).sees(q, k),
        lambda q, k, s, w: (k <= q) & ((k < s) | (k > q - w)),
    ],
    "tile_kinds": [kinds],
    "kinds_of_either": [either, lambda a, b: either(b, a)],
    "design_pattern": [design],
}
WRONG = {
    "sees_sinks_and_window": {
        "the window without its own key": lambda *a: sees(*a, own=-1),
        "one key too many": lambda *a: sees(*a, own=1),
        "sinks of the future": lambda *a: sees(*a, causal_sinks=False),
        "a window into the future": lambda *a: sees(*a, causal_window=False),
        "no mask for the future at all": lambda *a: sees(*a, causal_sinks=False, causal_window=False),
        "both instead of either": lambda q, k, s, w: (k <= q) & (k < s) & (q - k < w),
        "one sink too many": lambda q, k, s, w: sees(q, k, s + 1, w),
        "no sinks": lambda q, k, s, w: sees(q, k, 0, w),
        "no window": lambda q, k, s, w: (k < s) & (k <= q),
        "query and key swapped": lambda q, k, s, w: sees(k, q, s, w),
        "sinks and window swapped": lambda q, k, s, w: sees(q, k, w, s),
        "the first queries, not the first keys": lambda q, k, s, w: (k <= q) & ((q < s) | (q - k < w)),
        "distance on both sides": lambda q, k, s, w: (k < s) & (k <= q) | ((q - k).abs() < w),
        "numbers, not booleans": lambda *a: sees(*a).long(),
        "what is hidden": lambda *a: ~sees(*a),
        "as if all queries were last": lambda q, k, s, w: ((k < s) | (k > q.max() - w)) & (k <= q),
    },
    "tile_kinds": {
        "short tiles left out": lambda *a: kinds(*a, ragged=False),
        "booleans": lambda *a: kinds(*a).bool(),
        "int8": lambda *a: kinds(*a, dtype=torch.int8),
        "EMPTY and FULL swapped": lambda *a: 2 - kinds(*a),
        "FULL and PARTIAL swapped": lambda *a: kinds(*a, any_is=2, all_is=1),
        "only whether anything is visible": lambda *a: kinds(*a, all_is=1),
        "short tiles are never FULL": kinds_by_density,
        "by the corners": kinds_by_corners,
        "transposed": lambda mask, tile: kinds(mask, tile).T,
        "one pair a tile": lambda mask, tile: kinds(mask, 1),
        "how many are visible": lambda mask, tile: mask.long(),
        "a list": lambda *a: kinds(*a).tolist(),
    },
    "kinds_of_either": {
        "the maximum": either_by_maximum,
        "PARTIAL with PARTIAL is PARTIAL": either_partial,
        "the rule of both": both,
        "FULL forgotten": lambda a, b: torch.where(a == 0, b, torch.where(b == 0, a, 3)),
        "EMPTY decides": lambda a, b: torch.where((a == 0) | (b == 0), 0, either(a, b)),
        "only a is asked": lambda a, b: a.clone(),
        "not symmetric": lambda a, b: torch.where(a == 2, 2, torch.where(a == 0, b, 3)),
        "a sum": lambda a, b: (a + b).clamp(max=3),
        "UNKNOWN is catching": lambda a, b: torch.where((a == 3) | (b == 3), 3, either(a, b)),
        "two PARTIAL are FULL": lambda a, b: torch.where((a == 1) & (b == 1), 2, either(a, b)),
        "by the first tile": lambda a, b: either(a.flatten()[:1], b.flatten()[:1]).expand_as(a).clone(),
        "int8": lambda a, b: either(a, b).to(torch.int8),
    },
    "design_pattern": {
        "everything": lambda *a: Causal(),
        "a window": window_within,
        "sinks and a window": lambda *a: window_within(*a, sinks=4),
        "the future too": lambda *a: design(*a, causal=False),
        "without the diagonal": lambda *a: design(*a, diagonal=False),
        "one tile over": lambda *a: design(*a, spend=1),
        "four tiles unspent": lambda *a: design(*a, spend=-4),
        "transposed": lambda *a: design(*a, transposed=True),
        "the lightest": lambda *a: design(*a, largest=False),
        "by the largest weight": lambda *a: design(*a, by="max"),
        "nothing but itself": lambda *a: LocalWindow(0),
        "a layout too small": lambda weights, tile, budget: BlockSparsePattern([[True]], tile) & Causal(),
        "a mask, not a pattern": lambda weights, tile, budget: torch.ones(len(weights), len(weights)).tril().bool(),
        "the class": lambda *a: Causal,
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name) -> None:
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(name, a, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, a in wrong.items()],
)
def test_wrong(name, answer) -> None:
    assert getattr(check, name)(answer).status in ("wrong", "error")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda *a: Causal(), "the pattern visits 36 tiles, and the budget is 24"),
        (lambda *a: design(*a, causal=False), "query 0 sees key 1, which lies ahead of it"),
        (lambda *a: design(*a, diagonal=False), "does not see its own key"),
        (lambda *a: Causal, "expected a Pattern, got ABCMeta"),
        (lambda *a: BlockSparsePattern([[True]], 8), "the pattern is not defined for 64 tokens: layout has 1 blocks"),
    ],
    ids=["budget", "future", "blind", "class", "small"],
)
def test_a_rejected_design_is_told_why(answer, complaint) -> None:
    assert complaint in check.design_pattern(answer).message


def test_the_lessons_pattern_is_the_rule_that_the_first_exercise_asks_for() -> None:
    positions = torch.arange(12)
    seen = sees(positions[:, None], positions[None, :], 2, 4)
    assert torch.equal(seen, (GlobalTokens(2) | LocalWindow(3)).mask(12, 12))
