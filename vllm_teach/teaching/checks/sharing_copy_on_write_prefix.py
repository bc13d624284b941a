"""Checks of lesson 07: which writes copy, blocks of n samples, keys of a prefix cache, a rule of eviction."""

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from vllm_teach.performance.prefix_traces import busy_day
from vllm_teach.performance.ranked_cache import BlockUse, count_hits
from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check

LESSON = "07_sharing_copy_on_write_prefix"


def _copies_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "A block is copied if another table holds it as well; alone with it, a sequence writes in place."
    alone, shared = {"A": [3, 5]}, {"A": [3, 5], "B": [3, 5]}
    yield Case("A alone, inside its last block", (alone, [], "A", 6, 1, 4), (), rule)
    yield Case("A and B share both blocks", (shared, [], "A", 6, 1, 4), (5,), rule)
    yield Case("the same, B writes", (shared, [], "B", 6, 1, 4), (5,), rule)
    yield Case("A has copied already", ({"A": [3, 7], "B": [3, 5]}, [], "B", 6, 1, 4), (), rule)
    rule = "Only blocks that are written to are copied. What is shared and only read stays shared: that is the point."
    yield Case("block 3 is shared and full", ({"A": [3, 7], "B": [3, 5]}, [], "A", 7, 1, 4), (), rule)
    rule = "A token at the beginning of a new block needs a free block and no copy: there is nothing in it to keep."
    yield Case("at the end of the last block", (shared, [], "A", 8, 1, 4), (), rule)
    yield Case("a sequence without a block", ({"A": [], "B": [2]}, [2], "A", 0, 3, 4), (), rule)
    rule = "A prefix cache that pins a block counts as a holder: somebody may still come and read it."
    yield Case("A alone, its last block pinned", (alone, [5], "A", 6, 1, 4), (5,), rule)
    yield Case("pinned, but not written to", (alone, [3], "A", 6, 1, 4), (), rule)
    rule = (
        "A chunk of tokens may run over the last block's end: the block it begins in is copied, the new ones are not."
    )
    yield Case("a chunk of 7 tokens", (shared, [], "A", 6, 7, 4), (5,), rule)
    yield Case("a chunk of 8 tokens in new blocks", (shared, [5], "B", 8, 8, 4), (), rule)
    yield Case("nothing to write", (shared, [5], "B", 6, 0, 4), (), rule)
    rule = "The same holds for tables drawn at random: find the block of the first token, and ask who else needs it."
    for number in range(8):
        size, held, start = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 6), (2, 5), (1, 4))
        )
        tables = {name: torch.randperm(9, generator=generator)[:held].tolist() for name in "ABC"}
        pinned = torch.randperm(9, generator=generator)[:2].tolist()
        first, count = held * size - start, int(torch.randint(1, 4, (), generator=generator))
        if first < 0:
            continue
        written = {position // size for position in range(first, first + count)}
        blocks = [tables["B"][i] for i in sorted(written) if i < held]
        needed = tuple(b for b in blocks if b in pinned or any(b in tables[name] for name in "AC"))
        label = f"random tables {number}, {count} tokens from {first}, blocks of {size}"
        yield Case(label, (tables, pinned, "B", first, count, size), needed, rule)


def _blocks_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "All samples share the blocks that the prompt fills; everything behind them each sample holds for itself."
    sizes = [(6, 3, 2, 4), (8, 4, 4, 4), (512, 64, 4, 16), (100, 50, 8, 16)]
    sizes += [(*torch.randint(1, 60, (2,), generator=generator).tolist(), 3, 7) for _ in range(5)]
    for case in sizes:
        yield Case("prompt {}, output {}, n {}, block size {}".format(*case), case, _count_by_sets(*case), rule)
    rule = "With one sample there is nobody to share with: it holds its own tokens' blocks, rounded up."
    yield Case("one sample", (19, 58, 1, 16), _count_by_sets(19, 58, 1, 16), rule)
    rule = "Before the first token is written the prompt's last block is shared as well, full or not."
    yield Case("nothing written yet", (6, 0, 5, 4), _count_by_sets(6, 0, 5, 4), rule)
    yield Case("nothing written yet, full blocks", (8, 0, 5, 4), _count_by_sets(8, 0, 5, 4), rule)
    rule = (
        "The block in which the prompt ends is shared at first, and copied by each but the last one who writes to it."
    )
    yield Case("one token each", (6, 1, 5, 4), _count_by_sets(6, 1, 5, 4), rule)
    rule = "A prompt shorter than a block fills none: nothing stays shared."
    yield Case("a short prompt", (3, 5, 4, 16), _count_by_sets(3, 5, 4, 16), rule)


def _count_by_sets(prompt_len: int, output_len: int, n: int, block_size: int) -> int:
    """Name each block by what is in it, and count the names."""
    blocks = set()
    for sample in range(n):
        tokens = [("prompt", i) for i in range(prompt_len)] + [(sample, i) for i in range(output_len)]
        blocks |= {(i, tuple(tokens[i : i + block_size])) for i in range(0, len(tokens), block_size)}
    return len(blocks)


def _keys_problem(requests: list[tuple[str, list[int]]], block_size: int, got: Any) -> str | None:
    """Say which two blocks the keys confuse, or keep apart without need."""
    if not isinstance(got, list | tuple) or len(got) != len(requests):
        return f"expected a list with the keys of {len(requests)} requests, got {type(got).__name__}"
    prefix_of: dict[Hashable, tuple[str, tuple[int, ...]]] = {}
    key_of: dict[tuple[str, tuple[int, ...]], Hashable] = {}
    for number, ((salt, tokens), keys) in enumerate(zip(requests, got, strict=True)):
        full = len(tokens) // block_size
        if not isinstance(keys, list | tuple) or len(keys) != full:
            return f"request {number} has {full} full blocks; expected a list of as many keys, got {keys!r:.60}"
        for i, key in enumerate(keys):
            prefix = (salt, tuple(tokens[: (i + 1) * block_size]))
            if not isinstance(key, Hashable):
                return f"the key of request {number}, block {i} cannot stand in a dictionary: {key!r:.60}"
            other = prefix_of.setdefault(key, prefix)
            if other != prefix:
                return f"request {number}, block {i} has the key of another prefix: {prefix} and {other}"
            if key_of.setdefault(prefix, key) != key:
                return f"request {number}, block {i} has the prefix of an earlier request, but another key: no hit"
    return None


def _keys_cases(generator: torch.Generator) -> Iterator[Case]:
    def case(label: str, requests: list[tuple[str, list[int]]], size: int, rule: str) -> Case:
        judge = Judged(functools.partial(_keys_problem, requests, size))
        return Case(label, (requests, size), judge, rule)

    rule = "Equal tokens behind equal tokens are the same block for everybody; a key must not depend on the request."
    yield case("two equal requests", [("", [1, 2, 3, 4]), ("", [1, 2, 3, 4])], 2, rule)
    rule = "Only full blocks have a key: what is in the others still changes."
    yield case("a block that is not full", [("", [1, 2, 3, 4, 5]), ("", [1]), ("", [])], 2, rule)
    rule = "Keys and values depend on all tokens before them: without the parent's key another user's text answers."
    yield case("equal block, other parent", [("", [1, 2, 5, 6]), ("", [3, 4, 5, 6])], 2, rule)
    yield case("equal block, other grandparent", [("", [1, 2, 5, 6, 7, 8]), ("", [3, 4, 5, 6, 7, 8])], 2, rule)
    yield case("equal blocks at other positions", [("", [5, 6, 5, 6, 5, 6])], 2, rule)
    yield case("blocks in another order", [("", [1, 2, 3, 4, 5, 6]), ("", [3, 4, 1, 2, 5, 6])], 2, rule)
    rule = "The order of tokens in a block counts."
    yield case("tokens in another order", [("", [1, 2, 3, 4]), ("", [2, 1, 3, 4]), ("", [1, 2, 4, 3])], 2, rule)
    rule = "The salt belongs into the first key, and by the chain into all: tenants with other salts share nothing."
    yield case("other salts", [("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 4]), ("", [1, 2, 3, 4])], 2, rule)
    rule = "Two inputs must not become one when they are packed: without a separator [1, 23] and [12, 3] do."
    yield case("digits that run together", [("", [1, 23]), ("", [12, 3]), ("", [112, 3]), ("1", [12, 3])], 2, rule)
    yield case("a salt that looks like a token", [("1", [2, 3]), ("12", [3, 4]), ("", [1, 2])], 2, rule)
    rule = "A weak hash collides, and who can choose the tokens chooses the collision: use a cryptographic one."
    modulus = 2**61 - 1  # Python's hash of an integer is its remainder
    yield case("a crafted collision", [("", [7, 1]), ("", [7 + modulus, 1])], 2, rule)
    crowd = [("", torch.randint(0, 50_000, (3,), generator=generator).tolist()) for _ in range(3000)]
    yield case("3,000 blocks at random", crowd, 3, rule)


@functools.cache
def _days() -> tuple[tuple[str, list[Any]], ...]:
    return tuple((name, busy_day(300, seed=1, fashions=fashions)) for name, fashions in (("steady", 1), ("moody", 5)))


BLOCK_SIZE, ASKED = 16, 1.1
_SMALL, _LARGE = 100, 160  # blocks


@functools.cache
def _lru_hits(day: str, num_blocks: int) -> int:
    return count_hits(dict(_days())[day], num_blocks, BLOCK_SIZE, lambda use: use.released)


def try_out(rank: Callable[[BlockUse], Any]) -> dict[str, tuple[int, int]]:
    """For each of the two days, with 160 blocks: the prompt tokens that lru finds, and those that `rank` finds."""
    return {name: (_lru_hits(name, _LARGE), count_hits(day, _LARGE, BLOCK_SIZE, rank)) for name, day in _days()}


def _eviction_problem(day: str, num_blocks: int, rank: Any) -> str | None:
    if not callable(rank):
        return f"expected a function rank(use), got {type(rank).__name__}"
    lru, mine = _lru_hits(day, num_blocks), count_hits(dict(_days())[day], num_blocks, BLOCK_SIZE, rank)
    if mine >= ASKED * lru:
        return None
    return f"lru finds {lru:,} tokens, and your rule {mine:,}: at least {ASKED * lru:,.0f} are asked for"


def _eviction_cases(generator: torch.Generator) -> Iterator[Case]:
    rules = {
        "steady": "A document that comes once pushes out what all others use: recency alone does not tell them apart.",
        "moody": "What was popular this morning may never be asked for again: frequency alone does not forget.",
    }
    for num_blocks in (_LARGE, _SMALL):
        for day, rule in rules.items():
            judge = Judged(functools.partial(_eviction_problem, day, num_blocks))
            yield Case(f"the {day} day, {num_blocks} blocks", (try_out,), judge, rule)


CHECKS = [
    Check(
        name="blocks_to_copy",
        lesson=LESSON,
        task="Return the physical blocks, in their logical order, that must be copied before `writer` writes `count` "
        "tokens from position `first` on.",
        lesson_learnt="Copy on write costs at most one block a fork, however long the text is.",
        cases=_copies_cases,
        hints=(
            "Token p lies in logical block p // block_size. A table that is not that long has no block there yet.",
            "A block is needed by others if another table lists it, or if it is in `pinned`.",
            "Count holders over all tables but the writer's own. Blocks that are not written to are never copied.",
        ),
    ),
    Check(
        name="blocks_for_samples",
        lesson=LESSON,
        task="Return the physical blocks that n samples of one prompt hold together when each has output_len tokens "
        "and every token is stored.",
        lesson_learnt="Sharing saves whole blocks of the prompt: the longer the answers, the smaller its part.",
        cases=_blocks_cases,
        hints=(
            "prompt_len // block_size blocks are full of the prompt: they are there once.",
            "Each sample holds -(-(prompt_len + output_len) // block_size) blocks, those included.",
            "With output_len = 0 nobody has written: the block in which the prompt ends is there once, too.",
        ),
    ),
    Check(
        name="prefix_keys",
        lesson=LESSON,
        task="Return, for each request (salt, tokens), a list with a key for each of its full blocks. Two keys are "
        "equal exactly when the salts and all tokens up to the block's end are.",
        lesson_learnt="A key that leaves anything out answers one user from another one's text.",
        cases=_keys_cases,
        hints=(
            "A chain: key = hash(key of the block before, tokens of this block). The first one's parent is the salt's.",
            "Only len(tokens) // block_size blocks are full.",
            "hashlib.sha256 takes bytes: give every token the same width, token.to_bytes(8, 'big'), and the salt a "
            "hash of its own.",
        ),
    ),
    Check(
        name="better_than_lru",
        lesson=LESSON,
        task="Return a function rank(use), of use.inserted, use.released and use.uses. The block with the lowest rank "
        "goes first. On both days it finds at least 10 % more tokens than lru.",
        lesson_learnt="Recency and frequency say different things; a rule that mixes them needs a rate of forgetting.",
        cases=_eviction_cases,
        hints=(
            "try_out(lambda use: use.released) is lru itself. Try lfu, (use.uses, use.released): and each day?",
            "`released` counts requests, and so is a time. A block that was used twice has earned some more of it.",
            "rank = use.released + a number of requests, if use.uses > 1. How many? Try 20, 60 and 200.",
        ),
    ),
]
