"""Checks of lesson 06: a token's slot, blocks and waste of some lengths, buddies that merge, a block size to choose."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "06_paged_kv_cache"
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_RUNS = 2


def _draw(generator: torch.Generator, low: int, high: int, count: int) -> list[int]:
    """Return `count` whole numbers from `low` to `high`."""
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def _slot_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Token p is in logical block p // block_size, at place p % block_size; the table says which block that is."
    tables = [([0, 1, 5, 2], 4), ([7], 4), ([3, 9, 4], 16), ([6, 2, 8, 1, 0], 1), ([11, 5, 7], 5)]
    tables.append((torch.randperm(50, generator=generator)[:9].tolist(), 8))
    for blocks, size in tables:
        # Every slot by walking through the blocks, one token after the other.
        slots = [block * size + place for block in blocks for place in range(size)]
        last = len(slots) - 1
        for position in sorted({0, min(size - 1, last), min(size, last), last, *_draw(generator, 0, last, 2)}):
            label = f"table {blocks}, block size {size}, position {position}"
            yield Case(label, (blocks, size, position), slots[position], rule)


def _fill(length: int, size: int) -> tuple[int, int]:
    """Return the blocks that `length` tokens take and the slots they leave empty, by putting in one after the other."""
    blocks = room = 0
    for _ in range(length):
        if not room:
            blocks, room = blocks + 1, size
        room -= 1
    return blocks, room


def _totals(lengths: list[int], size: int) -> tuple[int, int]:
    filled = [_fill(length, size) for length in lengths]
    return sum(blocks for blocks, _ in filled), sum(room for _, room in filled)


def _waste_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "A sequence takes length / block_size blocks, rounded up, and what its last block has left is empty."
    settings: list[tuple[str, list[int], int]] = [
        ("three sequences", [6, 4, 3], 4),
        ("one token", [1], 16),
        ("blocks of one", [5, 9, 2], 1),
        ("one block for all", [3, 7], 256),
    ]
    settings += [(f"drawn, block size {size}", _draw(generator, 1, 300, 20), size) for size in (8, 16, 50)]
    for label, lengths, size in settings:
        yield Case(label, (lengths, size), _totals(lengths, size), rule)
    rule = "A full last block leaves nothing empty, and no further block is needed."
    yield Case("all full", ([16, 32, 48], 16), _totals([16, 32, 48], 16), rule)
    rule = "Each sequence rounds up on its own: two sequences never share a block here."
    yield Case("many short ones", ([1] * 10, 8), _totals([1] * 10, 8), rule)
    rule = "A sequence without a token has no block."
    yield Case("an empty sequence", ([0, 5], 4), _totals([0, 5], 4), rule)


def _runs_of(blocks: set[int], num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the buddies' division of the free `blocks`: from the longest runs on, those that are free as a whole."""
    left, runs = set(blocks), []
    length = 1
    while 2 * length <= num_blocks:
        length *= 2
    while length:
        for start in range(0, num_blocks - length + 1, length):
            run = set(range(start, start + length))
            if run <= left:
                runs.append((start, length))
                left -= run
        length //= 2
    return tuple(sorted(runs))


def _merge_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The buddy of the run (start, length) is (start ^ length, length); two free buddies become one run."
    settings: list[tuple[str, int, set[int], tuple[int, int]]] = [
        ("the buddy is free", 8, {4, 5}, (6, 2)),
        ("the buddy is taken", 8, {4, 5}, (2, 2)),
        ("nothing else is free", 8, set(), (3, 1)),
        ("all merges to one run", 8, {0, 1, 2, 3, 4, 6, 7}, (5, 1)),
        ("to the left and to the right", 16, {0, 1, 2, 3, 6, 7, 8, 9}, (4, 2)),
    ]
    for label, num_blocks, free, run in settings:
        yield Case(label, (list(_runs_of(free, num_blocks)), *run), _after(free, run, num_blocks), rule)
    rule = "Two runs that touch are buddies only if the run of both starts at a multiple of its own length."
    yield Case("neighbours, no buddies", ([(2, 2)], 4, 2), ((2, 2), (4, 2)), rule)
    rule = "A free buddy has the same length: a shorter free run in its place is not the whole buddy."
    yield Case("half of the buddy is free", ([(4, 1)], 6, 2), ((4, 1), (6, 2)), rule)
    rule = "The merged run has a buddy, too: go on until that one is not free."
    for number in range(4):
        free = set(torch.randperm(64, generator=generator)[:44].tolist())
        length = 2**number
        start = _draw(generator, 0, 64 // length - 1, 1)[0] * length
        free -= set(range(start, start + length))
        arguments = (list(_runs_of(free, 64)), start, length)
        yield Case(f"64 blocks, a run of {length}", arguments, _after(free, (start, length), 64), rule)


def _after(free: set[int], run: tuple[int, int], num_blocks: int) -> tuple[tuple[int, int], ...]:
    start, length = run
    return _runs_of(free | set(range(start, start + length)), num_blocks)


class RunLimitError(Exception):
    """More runs than the exercise allows."""


def meter(lengths: list[int], per_slot: int, per_block: int) -> Callable[[int], int]:
    """Return run(block_size) = per_slot · empty slots + per_block · blocks: what a run costs, in bytes.

    A closure: it has nothing to read. `run` raises RunLimitError beyond 2 calls.
    """
    runs = 0

    def run(block_size: int) -> int:
        nonlocal runs
        runs += 1
        if runs > MOST_RUNS:
            raise RunLimitError(f"{MOST_RUNS} runs are allowed: choose two that tell you both prices.")
        blocks = sum(-(-length // block_size) for length in lengths)
        return per_slot * (blocks * block_size - sum(lengths)) + per_block * blocks

    return run


def _choice_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "cost(b) = per_slot · empty(b) + per_block · blocks(b): two runs give the two prices, arithmetic the rest."
    long, short = _draw(generator, 100, 2000, 30), _draw(generator, 5, 90, 30)
    settings: list[tuple[str, list[int], int, int]] = [
        ("long answers, cheap blocks", long, 500, 700),
        ("long answers, dear blocks", long, 40, 60_000),
        ("long answers, blocks for nothing", long, 300, 1),
        ("short answers", short, 200, 1600),
        ("short answers, dear blocks", short, 10, 90_000),
        ("a mix", [*long[:10], *short], 100, 3000),
        ("every answer has 40 tokens, but one", [40] * 20 + [39], 100, 150),
        ("every answer has 97 tokens", [97] * 12, 100, 900),
    ]
    for label, lengths, per_slot, per_block in settings:
        costs = {}
        for size in BLOCK_SIZES:
            blocks, empty = _totals(lengths, size)
            costs[size] = per_slot * empty + per_block * blocks
        best = min(costs, key=costs.__getitem__)
        yield Case(label, (lengths, MadeAnew(partial(meter, lengths, per_slot, per_block))), best, rule)


CHECKS = [
    Check(
        name="slot_of_token",
        lesson=LESSON,
        task="Return the slot of the token at `position`, given the sequence's block table and the block size.",
        lesson_learnt="One look-up, one product, one sum: that is all the addressing that paging needs.",
        cases=_slot_cases,
        hints=(
            "Which logical block is the token in, and at which place? // and % say so.",
            "blocks[logical] is the physical block; its first slot is that number times block_size.",
            "blocks[position // block_size] * block_size + position % block_size.",
        ),
    ),
    Check(
        name="blocks_and_waste",
        lesson=LESSON,
        task="Return (blocks, empty slots) of sequences of these lengths, in tokens, each in blocks of its own.",
        lesson_learnt="At most block_size - 1 slots a sequence, whatever its length: about half a block each.",
        cases=_waste_cases,
        hints=(
            "How many blocks do 6 tokens take at block size 4, and how many 8?",
            "Rounding up without floats: -(-length // block_size).",
            "All slots of all blocks, less all tokens, are empty.",
        ),
    ),
    Check(
        name="free_buddies",
        lesson=LESSON,
        task="Return the free runs, in order, as (start, length), after the run (start, length) has become free and "
        "has merged with its free buddies. `free` are those before, in order.",
        lesson_learnt="Freeing costs one step for each power of two, and no search: the buddy's place is known.",
        cases=_merge_cases,
        hints=(
            "The buddy of (4, 2) is (6, 2), and that of (6, 2) is (4, 2): flip one bit, start ^ length.",
            "If (start ^ length, length) is among the free runs, take it out; the merged run starts at the lower one.",
            "The merged run is twice as long and may have a free buddy itself: repeat until it has none.",
            "while (start ^ length, length) in runs: remove it; start = min(start, start ^ length); length *= 2.",
        ),
    ),
    Check(
        name="choose_block_size",
        lesson=LESSON,
        task="Return the block size of 1, 2, 4, …, 256 with the least cost, in at most 2 runs. run(block_size) costs "
        "one price for each empty slot and another for each block; neither price is told, `lengths` are known.",
        lesson_learnt="Two unknown prices need two runs. What can be computed does not need to be measured.",
        cases=_choice_cases,
        hints=(
            "You can count the blocks and the empty slots of any block size from `lengths`. What is left unknown?",
            "At block size 1 no slot is empty: that run tells you the price of a block.",
            "A second run at any other size tells you the price of a slot: subtract what its blocks cost.",
            "Now compute the cost of all nine sizes and return the size with the least.",
        ),
    ),
]
