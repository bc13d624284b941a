"""Traces of prompts that share prefixes, and what a prefix cache makes of them. No model: bookkeeping alone, exact."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.usage import CacheUsage


@dataclass(frozen=True)
class Visit:
    """One request: its prompt, and how many tokens of answer follow it. `kind` says who sent it."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()


def shared_prompt(num_requests: int, system_tokens: int, question_tokens: int, answer_tokens: int = 0) -> list[Visit]:
    """Return requests that begin with one system prompt and go on with a question of their own."""
    fresh = count()
    system = _draw(fresh, system_tokens)
    return [
        Visit("question", (*system, *_draw(fresh, question_tokens)), _draw(fresh, answer_tokens))
        for _ in range(num_requests)
    ]


def conversation(turns: int, system_tokens: int, question_tokens: int, answer_tokens: int) -> list[Visit]:
    """Return the turns of one chat: each prompt is all that was said before, and a new question."""
    fresh = count()
    return list(_turns(fresh, _draw(fresh, system_tokens), turns, question_tokens, answer_tokens))


def busy_day(num_requests: int = 400, seed: int = 0, fashions: int = 1) -> list[Visit]:
    """Return a mix, the same for one seed on every machine.

    A third of the requests are questions to one of six assistants, the first far more popular than the last; a quarter
    repeat one of 16 popular prompts word for word; a sixth are turns of chats, 12 of which go on at a time; a quarter
    are documents that nobody sends again. With `fashions` above 1 the day has so many parts of equal length, and
    assistants and popular prompts are others in each. Lengths in tokens: system prompts 96 to 192, questions 10 to 60,
    popular prompts 60 to 240, answers 20 to 80, documents 200 to 600.
    """
    source, fresh = random.Random(seed), count()
    chats: list[Iterator[Visit]] = []
    visits: list[Visit] = []
    while len(visits) < num_requests:
        if len(visits) % -(-num_requests // fashions) == 0:
            assistants = [_draw(fresh, source.randrange(96, 193)) for _ in range(6)]
            popular = [_draw(fresh, source.randrange(60, 241)) for _ in range(16)]
        dice, answer = source.random(), source.randrange(20, 81)
        if dice < 1 / 3:
            system = assistants[min(int(source.expovariate(0.7)), 5)]
            prompt = (*system, *_draw(fresh, source.randrange(10, 61)))
            visits.append(Visit("assistant", prompt, _draw(fresh, answer)))
        elif dice < 7 / 12:
            visits.append(Visit("popular", popular[min(int(source.expovariate(0.2)), 15)], _draw(fresh, answer)))
        elif dice < 3 / 4:
            visits.append(_next_turn(chats, source, fresh))
        else:
            visits.append(Visit("document", _draw(fresh, source.randrange(200, 601)), _draw(fresh, answer)))
    return visits


def replay(
    trace: Sequence[Visit],
    num_blocks: int,
    block_size: int = 16,
    *,
    prefix_cache: str | None = "hash",
    eviction: str = "lru",
) -> CacheUsage:
    """Send the requests of `trace` through a KV cache, one after the other, and return its figures at the end.

    Each is looked up, computed, answered and freed before the next one comes. Raises InvalidArgumentError for one that
    does not fit alone.
    """
    kv = KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache, eviction=eviction)
    for number, visit in enumerate(trace):
        text = (*visit.prompt, *visit.answer)
        tokens = partial(_part, text)
        num_tokens = max(len(visit.prompt), len(text) - 1)  # the last token of an answer is never computed
        kv.begin(number, visit.prompt)
        if not kv.extend(number, num_tokens):
            raise InvalidArgumentError(f"num_blocks={num_blocks} is too few: request {number} has {num_tokens} tokens.")
        kv.commit(number, num_tokens, tokens)
        kv.free(number, tokens, num_tokens)
    return kv.usage()


def most_hits(trace: Sequence[Visit]) -> int:
    """Return the prompt tokens that a cache without limits finds: it forgets nothing, and counts token by token."""
    tree: dict[int, Any] = {}
    found = 0
    for visit in trace:
        node, depth = tree, 0
        while depth < len(visit.prompt) - 1 and visit.prompt[depth] in node:
            node, depth = node[visit.prompt[depth]], depth + 1
        found += depth
        node = tree
        for token in (*visit.prompt, *visit.answer[:-1]):
            node = node.setdefault(token, {})
    return found


def _turns(fresh: Iterator[int], past: tuple[int, ...], turns: int, question: int, answer: int) -> Iterator[Visit]:
    for _ in range(turns):
        prompt, said = (*past, *_draw(fresh, question)), _draw(fresh, answer)
        yield Visit("chat", prompt, said)
        past = (*prompt, *said)


def _next_turn(chats: list[Iterator[Visit]], source: random.Random, fresh: Iterator[int]) -> Visit:
    """Let one of the chats go on; those that have ended make place for new ones."""
    while True:
        if len(chats) < 12:
            chats.append(_turns(fresh, (), source.randrange(2, 9), source.randrange(10, 61), source.randrange(20, 81)))
        place = source.randrange(len(chats))
        turn = next(chats[place], None)
        if turn is not None:
            return turn
        del chats[place]


def _part(text: tuple[int, ...], start: int, size: int) -> tuple[int, ...]:
    return text[start : start + size]


def _draw(fresh: Iterator[int], size: int) -> tuple[int, ...]:
    """Return `size` tokens that occur nowhere else."""
    return tuple(next(fresh) for _ in range(size))
