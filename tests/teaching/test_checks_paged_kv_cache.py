"""Lesson 06's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest

from vllm_teach.kvcache.buddy import BuddyAllocator
from vllm_teach.teaching import check
from vllm_teach.teaching.checks.paged_kv_cache import BLOCK_SIZES, meter


def slot(blocks, size, position):
    return blocks[position // size] * size + position % size


def totals(lengths, size):
    blocks = [-(-length // size) for length in lengths]
    return sum(blocks), sum(blocks) * size - sum(lengths)


def totals_one_by_one(lengths, size):
    """Right: a remainder, where there is one."""
    blocks = empty = 0
    for length in lengths:
        blocks += (length + size - 1) // size
        empty += (size - length % size) % size
    return blocks, empty


def merge(free, start, length, *, repeat=True, buddy=None, right_only=False):
    runs = set(free)
    buddy = buddy or (lambda start, length: start ^ length)
    while (other := (buddy(start, length), length)) in runs and not (right_only and other[0] < start):
        runs.remove(other)
        start, length = min(start, other[0]), 2 * length
        if not repeat:
            break
    return sorted([*runs, (start, length)])


def merge_by_allocator(free, start, length):
    """Right: the package's own."""
    allocator = BuddyAllocator(64)
    while len(allocator):
        allocator.take()
    for run in (*free, (start, length)):
        allocator.free_run(*run)
    return allocator.free_runs()


def join_neighbours(free, start, length):
    """Joins whatever touches, as a list of gaps would."""
    joined = []
    for first, size in sorted([*free, (start, length)]):
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((first, size))
    return joined


def merge_in_place(free, start, length):
    answer = merge(free, start, length)
    free[:] = answer
    return answer


def touching_of_equal_length(free, start, length):
    """Takes any neighbour of the same length for the buddy."""
    runs = set(free)
    while True:
        other = next((s for s in (start - length, start + length) if (s, length) in runs), None)
        if other is None:
            return sorted([*runs, (start, length)])
        runs.remove((other, length))
        start, length = min(start, other), 2 * length


def choose(lengths, run, first=1, second=256, count=totals, pick=min, answer=lambda costs, size: size):
    """Solve two equations for the two prices; compute the rest."""
    (blocks_1, empty_1), (blocks_2, empty_2) = count(lengths, first), count(lengths, second)
    cost_1, cost_2 = run(first), run(second)
    determinant = blocks_1 * empty_2 - blocks_2 * empty_1
    per_block = (cost_1 * empty_2 - cost_2 * empty_1) / determinant
    per_slot = (blocks_1 * cost_2 - blocks_2 * cost_1) / determinant
    costs = {}
    for size in BLOCK_SIZES:
        blocks, empty = count(lengths, size)
        costs[size] = per_slot * empty + per_block * blocks
    return answer(costs, pick(costs, key=costs.get))


def half_a_block(lengths, run):
    """Supposes half a block empty in each sequence, and no rounding in the number of blocks."""
    tokens, count = sum(lengths), len(lengths)
    per_block = run(1) / tokens
    blocks, empty = totals(lengths, 256)
    per_slot = (run(256) - per_block * blocks) / empty
    return 2 ** min(8, round(math.log2(math.sqrt(2 * tokens * per_block / (count * per_slot)))))


def floors(lengths, size):
    blocks = sum(length // size for length in lengths)
    return blocks, sum(length % size for length in lengths)


def one_more(lengths, size):
    blocks = sum(length // size + 1 for length in lengths)
    return blocks, blocks * size - sum(lengths)


def as_one_sequence(lengths, size):
    return totals([sum(lengths)], size)


RIGHT = {
    "slot_of_token": [slot, lambda b, s, p: [block * s + i for block in b for i in range(s)][p]],
    "blocks_and_waste": [totals, totals_one_by_one],
    "free_buddies": [merge, merge_by_allocator],
    "choose_block_size": [choose, lambda n, run: choose(n, run, 2, 64), lambda n, run: choose(n, run, 16, 1)],
}
WRONG = {
    "slot_of_token": {
        "the position itself": lambda b, s, p: p,
        "the logical block": lambda b, s, p: p // s * s + p % s,
        "the block alone": lambda b, s, p: b[p // s],
        "the block's first slot": lambda b, s, p: b[p // s] * s,
        "the place alone": lambda b, s, p: p % s,
        "position added": lambda b, s, p: b[p // s] * s + p,
        "// and % swapped": lambda b, s, p: b[p % len(b)] * s + p // s,
        "not times the block size": lambda b, s, p: b[p // s] + p % s,
        "always 4": lambda b, s, p: b[p // 4] * 4 + p % 4,
        "always 16": lambda b, s, p: b[p // 16] * 16 + p % 16,
        "blocks from 1": lambda b, s, p: (b[p // s] - 1) * s + p % s,
        "positions from 1": lambda b, s, p: slot(b, s, p - 1),
        "the first block only": lambda b, s, p: b[0] * s + p,
        "the last block only": lambda b, s, p: b[-1] * s + p % s,
        "sorted": lambda b, s, p: slot(sorted(b), s, p),
        "a float": lambda b, s, p: b[int(p / s)] * s + p / s,
        "block and place": lambda b, s, p: (b[p // s], p % s),
    },
    "blocks_and_waste": {
        "rounded down": lambda n, s: (sum(x // s for x in n), sum(x % s for x in n)),
        "one more block": one_more,
        "full blocks waste a block": lambda n, s: (totals(n, s)[0], sum(s - x % s for x in n)),
        "as one sequence": as_one_sequence,
        "half a block each": lambda n, s: (totals(n, s)[0], len(n) * s // 2),
        "most there could be": lambda n, s: (totals(n, s)[0], len(n) * (s - 1)),
        "tokens of the last block": lambda n, s: (totals(n, s)[0], sum(x % s for x in n)),
        "swapped": lambda n, s: totals(n, s)[::-1],
        "blocks alone": lambda n, s: totals(n, s)[0],
        "empty slots alone": lambda n, s: totals(n, s)[1],
        "slots for blocks": lambda n, s: (totals(n, s)[0] * s, totals(n, s)[1]),
        "the longest only": lambda n, s: totals([max(n)], s),
        "at least a block each": lambda n, s: totals([max(x, 1) for x in n], s),
        "block size 16": lambda n, s: totals(n, 16),
        "a mean": lambda n, s: (totals(n, s)[0], totals(n, s)[1] / len(n)),
        "rounded to the nearest": lambda n, s: (sum(round(x / s) for x in n), totals(n, s)[1]),
    },
    "free_buddies": {
        "no merge": lambda f, s, n: sorted([*f, (s, n)]),
        "one merge only": lambda f, s, n: merge(f, s, n, repeat=False),
        "with the right only": lambda f, s, n: merge(f, s, n, right_only=True),
        "the next run as buddy": lambda f, s, n: merge(f, s, n, buddy=lambda start, length: start + length),
        "the run before as buddy": lambda f, s, n: merge(f, s, n, buddy=lambda start, length: start - length),
        "any neighbour of the length": touching_of_equal_length,
        "any neighbours": join_neighbours,
        "not in order": lambda f, s, n: sorted(merge(f, s, n), reverse=True),
        "the new run last": lambda f, s, n: (
            [r for r in merge(f, s, n) if r in f] + [r for r in merge(f, s, n) if r not in f]
        ),
        "the merged run alone": lambda f, s, n: [r for r in merge(f, s, n) if r not in f],
        "those before": lambda f, s, n: list(f),
        "(start, end)": lambda f, s, n: [(a, a + b) for a, b in merge(f, s, n)],
        "starts alone": lambda f, s, n: [a for a, _ in merge(f, s, n)],
        "inputs changed": merge_in_place,
        "a dict": lambda f, s, n: dict(merge(f, s, n)),
        "single blocks": lambda f, s, n: sorted((b, 1) for a, c in [*f, (s, n)] for b in range(a, a + c)),
    },
    "choose_block_size": {
        "always 16": lambda n, run: 16,
        "the least empty": lambda n, run: 1,
        "the fewest blocks": lambda n, run: 256,
        "all nine runs": lambda n, run: min(BLOCK_SIZES, key=run),
        "the better of two": lambda n, run: min((1, 256), key=run),
        "the better of two near the middle": lambda n, run: min((16, 32), key=run),
        "half a block empty": half_a_block,
        "rounded down": lambda n, run: choose(n, run, count=floors),
        "one block more": lambda n, run: choose(n, run, 2, 64, count=one_more),
        "as one sequence": lambda n, run: choose(n, run, 2, 64, count=as_one_sequence),
        "the dearest": lambda n, run: choose(n, run, pick=max),
        "the cost": lambda n, run: choose(n, run, answer=lambda costs, size: costs[size]),
        "size and cost": lambda n, run: choose(n, run, answer=lambda costs, size: (size, costs[size])),
        "its index": lambda n, run: choose(n, run, answer=lambda costs, size: BLOCK_SIZES.index(size)),
        "the next larger": lambda n, run: choose(n, run, answer=lambda costs, size: 2 * size),
        "a third run to be sure": lambda n, run: (choose(n, run), run(16))[0],
        "the same size twice": lambda n, run: choose(n, run, 8, 8),
        "a slot costs as much as a block": lambda n, run: min(BLOCK_SIZES, key=lambda size: sum(totals(n, size))),
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


def test_one_size_costs_least_and_any_other_tells_the_price_of_a_slot():
    bests = set()
    for case in check.choose_block_size.cases():
        lengths, run = case.fresh_arguments()
        costs = choose(lengths, run, answer=lambda costs, size: costs)
        first, second = sorted(costs.values())[:2]
        assert second > first * 1.001
        assert all(totals(lengths, size)[1] > 0 for size in BLOCK_SIZES[1:])
        bests.add(case.expected)
    assert len(bests) >= 5


def test_a_third_run_is_refused():
    run = meter([5, 7], 2, 3)
    assert [run(1), run(4)] == [36, 2 * 4 + 3 * 4]
    with pytest.raises(Exception, match="2 runs are allowed"):
        run(8)


def test_what_the_learner_gets_has_nothing_to_read():
    for case in check.choose_block_size.cases():
        assert vars(case.fresh_arguments()[1]) == {}
