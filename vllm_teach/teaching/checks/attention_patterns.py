"""Checks of lesson 04: a pattern's rule, the kinds of tiles, how they combine, and a budget of tiles to spend."""

from collections.abc import Iterator
from itertools import product

import torch

from vllm_teach.attention.patterns import Pattern, TileKind
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check

LESSON = "04_attention_patterns"
ENOUGH = 0.99  # of the weight that the best choice of tiles keeps


def _rule_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Seen: key <= query, and the key is one of the first `sinks` or one of the last `window`, its own included."
    for length, sinks, window in ((6, 1, 2), (8, 2, 3), (9, 4, 1), (7, 0, 3), (5, 1, 20), (6, 9, 2)):
        positions = torch.arange(length)
        seen = [
            [key <= query and (key < sinks or query - key < window) for key in range(length)] for query in range(length)
        ]
        arguments = (positions[:, None], positions[None, :], sinks, window)
        yield Case(f"{length} tokens, {sinks} sinks, a window of {window}", arguments, torch.tensor(seen), rule)
    rule = "Positions are all there is: the pairs may come in any order and shape, one answer for each."
    query, key = (torch.randint(0, 40, (30,), generator=generator) for _ in range(2))
    seen_pairs = [k <= q and (k < 3 or q - k < 6) for q, k in zip(query.tolist(), key.tolist(), strict=True)]
    yield Case("30 single pairs", (query, key, 3, 6), torch.tensor(seen_pairs), rule)
    rule = "A query may stand before position 0, when there are more queries than keys: it sees no key."
    query, key = torch.arange(-2, 3)[:, None], torch.arange(3)[None, :]
    early = [[k <= q and (k < 1 or q - k < 2) for k in range(3)] for q in range(-2, 3)]
    yield Case("5 queries, 3 keys", (query, key, 1, 2), torch.tensor(early), rule)


def _kind_of(pairs: list[bool]) -> int:
    return int(TileKind.FULL if all(pairs) else TileKind.PARTIAL if any(pairs) else TileKind.EMPTY)


def _tile_kinds_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "0: no pair of the tile is visible; 2: all are; 1: some. A last tile may be short: count what it has."
    for q_len, kv_len, tile, density in (
        (4, 4, 2, 0.5),
        (6, 9, 3, 0.9),
        (7, 5, 3, 0.9),
        (5, 8, 4, 0.1),
        (3, 3, 8, 1.0),
    ):
        mask = torch.rand(q_len, kv_len, generator=generator) < density
        kinds = [
            [
                _kind_of(mask[row : row + tile, column : column + tile].flatten().tolist())
                for column in range(0, kv_len, tile)
            ]
            for row in range(0, q_len, tile)
        ]
        yield Case(f"{q_len} x {kv_len} pairs, tiles of {tile}", (mask, tile), torch.tensor(kinds), rule)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    kinds = [[2 if column < row else 1 if column == row else 0 for column in range(4)] for row in range(4)]
    yield Case("the causal mask of 8 tokens, tiles of 2", (causal, 2), torch.tensor(kinds), rule)


def _either(a: int, b: int) -> int:
    """What is certain of a | b, by trying every tile of two pairs that has the two kinds."""
    tiles = list(product((False, True), repeat=2))

    def possible(kind: int) -> list[tuple[bool, ...]]:
        return [tile for tile in tiles if kind in (TileKind.UNKNOWN, _kind_of(list(tile)))]

    found = {
        _kind_of([x or y for x, y in zip(one, other, strict=True)]) for one in possible(a) for other in possible(b)
    }
    return found.pop() if len(found) == 1 else int(TileKind.UNKNOWN)


def _either_cases(generator: torch.Generator) -> Iterator[Case]:
    rules = {
        TileKind.EMPTY: "EMPTY adds nothing: what the other one says stays.",
        TileKind.PARTIAL: "PARTIAL with PARTIAL or UNKNOWN may fill the tile or not: UNKNOWN, somebody has to look.",
        TileKind.FULL: "FULL is enough: whatever the other one shows, the tile is FULL.",
        TileKind.UNKNOWN: "With UNKNOWN only FULL decides; EMPTY leaves it UNKNOWN.",
    }
    every = torch.arange(4)
    for kind, rule in rules.items():
        expected = torch.tensor([_either(int(kind), other) for other in range(4)])
        yield Case(f"{kind.name} with each kind", (torch.full((4,), int(kind)), every), expected, rule)
    rule = "Each tile decides for itself, and a | b is b | a."
    a, b = (torch.randint(0, 4, (5, 6), generator=generator) for _ in range(2))
    expected = torch.tensor([_either(*pair) for pair in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)])
    yield Case("two maps of 5 x 6 tiles", (a, b), expected.view(5, 6), rule)


def _weights(generator: torch.Generator, n: int, window: int, far: list[tuple[slice, slice]]) -> torch.Tensor:
    """Attention weights `[n, n]` of a head that reads its neighbours, the first key, and the places in `far`."""
    ahead = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    scores = torch.randn(n, n, generator=generator, dtype=torch.float64)
    scores += 3.0 * (ahead > -window)
    scores[:, 0] += 5
    for queries, keys in far:
        scores[queries, keys] += 5
    return scores.masked_fill(ahead > 0, float("-inf")).softmax(dim=-1)


def _best_share(weights: torch.Tensor, tile: int, budget: int) -> float:
    """The largest share of the weight in `budget` tiles: those on the diagonal, which no one may leave out, and others.

    A tile's weight does not depend on which others are chosen, so the heaviest ones are the best choice.
    """
    n = len(weights)
    sums = {
        (row, column): float(weights[row : row + tile, column : column + tile].sum())
        for row in range(0, n, tile)
        for column in range(0, row + 1, tile)
    }
    on_diagonal = [weight for (row, column), weight in sums.items() if row == column]
    others = sorted((weight for (row, column), weight in sums.items() if row != column), reverse=True)
    return (sum(on_diagonal) + sum(others[: budget - len(on_diagonal)])) / n


def _judge_design(weights: torch.Tensor, tile: int, budget: int, got: object) -> str | None:
    """Say in one line why the pattern `got` is no answer, or return None."""
    if not isinstance(got, Pattern):
        return f"expected a Pattern, got {type(got).__name__}"
    n = len(weights)
    try:
        mask, kinds = got.mask(n, n), got.tile_map(n, n, tile, tile)
    except InvalidArgumentError as error:
        return f"the pattern is not defined for {n} tokens: {error}"
    if bool(mask.triu(1).any()):
        query, key = torch.nonzero(mask.triu(1))[0].tolist()
        return f"query {query} sees key {key}, which lies ahead of it"
    if not bool(mask.diagonal().all()):
        return f"query {int(torch.nonzero(~mask.diagonal())[0])} does not see its own key"
    visited = int((kinds != TileKind.EMPTY).sum())
    if visited > budget:
        return f"the pattern visits {visited} tiles, and the budget is {budget}"
    kept, best = float(weights[mask].sum()) / n, _best_share(weights, tile, budget)
    if kept < ENOUGH * best:
        return f"the pattern keeps {kept:.1%} of the weight with {visited} tiles; {best:.1%} are possible with {budget}"
    return None


def _design_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = (
        "Spend the tiles where the weight is: all of the diagonal first, then the heaviest tiles, whatever their place."
    )
    settings = {
        "neighbours and a sink": (64, 8, 24, 10, []),
        "a passage that is read again": (64, 8, 26, 10, [(slice(50, 62), slice(17, 30))]),
        "two places far back, a short last tile": (
            60,
            8,
            27,
            6,
            [(slice(40, 48), slice(8, 16)), (slice(57, 60), slice(24, 32))],
        ),
        "tiles of 16": (96, 16, 15, 20, [(slice(70, 90), slice(34, 44))]),
        "a budget for the diagonal alone": (40, 8, 5, 4, []),
    }
    for label, (n, tile, budget, window, far) in settings.items():
        weights = _weights(generator, n, window, far)

        def problem(got: object, case: tuple[torch.Tensor, int, int] = (weights, tile, budget)) -> str | None:
            return _judge_design(*case, got)

        yield Case(f"{label}: {n} tokens, {budget} tiles of {tile}", (weights, tile, budget), Judged(problem), rule)


CHECKS = [
    Check(
        name="sees_sinks_and_window",
        lesson=LESSON,
        task="Return, elementwise and as bool, whether a query at q_pos sees the key at k_pos: one of the first "
        "`sinks` keys or one of the last `window`, the query's own included, and never a later one.",
        lesson_learnt="That one line is GlobalTokens(sinks) | LocalWindow(window - 1), and all that a pattern needs.",
        cases=_rule_cases,
        hints=(
            "Three conditions on tensors: &, | and brackets, not `and` and `or`.",
            "A window of 1 key is the query's own alone: q_pos - k_pos < window.",
            "Sinks do not excuse the future: (k_pos <= q_pos) & (… | …).",
        ),
    ),
    Check(
        name="tile_kinds",
        lesson=LESSON,
        task="Return the kind of each tile of a bool mask [q_len, kv_len] as an int64 tensor [q tiles, k tiles]: "
        "0 EMPTY, 1 PARTIAL, 2 FULL.",
        lesson_learnt="A kernel needs this map of a pattern, and the masks of the PARTIAL tiles, and no more.",
        cases=_tile_kinds_cases,
        hints=(
            "Two loops over range(0, q_len, tile) and range(0, kv_len, tile); a slice beyond the end is cut by itself.",
            "any() and all() of the tile decide: all is FULL, none is EMPTY, else PARTIAL.",
            "int(piece.any()) + int(piece.all()) is the kind.",
        ),
    ),
    Check(
        name="kinds_of_either",
        lesson=LESSON,
        task="Return what is certain of the tiles of a | b from the kinds of a's and b's tiles, int64 tensors of equal "
        "shape: 0 EMPTY, 1 PARTIAL, 2 FULL, 3 UNKNOWN.",
        lesson_learnt="The maps of large patterns come from those of small ones; only UNKNOWN tiles are looked at.",
        cases=_either_cases,
        hints=(
            "Which kind decides alone, whatever the other one is? Which one changes nothing?",
            "Two PARTIAL tiles: draw a left half and a right half, then the same half twice.",
            "torch.where(a == 2, 2, …), from the most certain case to the least; the rest is 3.",
        ),
    ),
    Check(
        name="design_pattern",
        lesson=LESSON,
        task="Return a Pattern that keeps of the attention weights [n, n] what `budget` tiles of `tile` x `tile` can: "
        "no query sees a later key, each sees its own, and the kept weight is at least 99 % of the best.",
        lesson_learnt="Which tiles matter shows in the weights: a pattern can be made to fit a text.",
        cases=_design_cases,
        hints=(
            "A fixed shape fits one text. Add up the weight in each tile: where is it?",
            "The tiles on the diagonal are not yours to choose: each query needs its own key. Spend the rest.",
            "BlockSparsePattern(layout, tile) takes a grid of booleans, one a tile; & Causal() hides the future.",
            "torch.topk of the sums below the diagonal gives the others, budget minus the diagonal's tiles of them.",
        ),
    ),
]
