"""Prompts of an exact number of tokens, for a server whose tokenizer may be known only by asking it.

Token ids are exact by nature. A text is not: the ids of a piece of text, decoded and encoded again, may be more or
fewer. So a text is made from ids, counted, and made anew until its count is right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.plan import PlannedRequest

MOST_TEXTS = 20_000  # prompts as text that are made before the clock starts; then they come again

_TEXT = "texts/corran_sound.txt"
_PIECE = 2_000  # characters that are encoded at once: a server may limit what it takes
_TRIES = 24
_AT_ONCE = 16
_OWN = 2  # tokens at a prompt's beginning that are drawn each for itself


class Codec(Protocol):
    """A tokenizer, here or behind a server: ids without special tokens."""

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""


@dataclass(frozen=True)
class PromptSource:
    """Cuts prompts from `text_ids`, which goes on at its beginning where it ends.

    All prompts begin with the same `shared_prefix` tokens. The next two are drawn one by one, so that beyond it no two
    prompts begin alike by chance and a prefix cache finds what it is meant to find.
    """

    text_ids: tuple[int, ...]
    seed: int = 0
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        if not self.text_ids:
            raise InvalidArgumentError("text_ids is empty: give the token ids of some text.")
        if self.shared_prefix < 0:
            raise InvalidArgumentError(f"shared_prefix={self.shared_prefix} is no length: give 0 or more tokens.")

    def ids(self, index: int, length: int, attempt: int = 0) -> list[int]:
        """Return the `length` ids of request `index`; the same for the same seed, whatever was asked before."""
        source = random.Random(f"{self.seed} prompt {index} {attempt}")
        own = [source.choice(self.text_ids) for _ in range(_OWN)]
        start = source.randrange(len(self.text_ids))
        shared = self._piece(0, min(length, self.shared_prefix))
        rest = length - len(shared)
        return shared + own[:rest] + self._piece(start, max(0, rest - _OWN))

    def _piece(self, start: int, length: int) -> list[int]:
        size = len(self.text_ids)
        return [self.text_ids[(start + i) % size] for i in range(length)]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt as text, and how many tokens it has as its tokenizer counts."""

    text: str
    num_tokens: int


async def load_text_ids(codec: Codec) -> tuple[int, ...]:
    """Return the ids of the text that travels with the package."""
    text = data.path(_TEXT).read_text(encoding="utf-8")
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    return tuple([token for piece in pieces for token in await codec.encode(piece)])


async def fit_text(codec: Codec, source: PromptSource, index: int, length: int) -> TextPrompt:
    """Return a text for request `index` of exactly `length` tokens, or, after two dozen tries, of the nearest count."""
    best: TextPrompt | None = None
    asked, attempt = length, 0
    for number in range(_TRIES):
        text = await codec.decode(source.ids(index, asked, attempt))
        found = TextPrompt(text, len(await codec.encode(text)))
        if found.num_tokens == length:
            return found
        if found.num_tokens and (best is None or abs(found.num_tokens - length) < abs(best.num_tokens - length)):
            best = found
        # As many ids more or fewer; where that goes to and fro, another place of the text.
        asked = max(1, asked + length - found.num_tokens)
        attempt += number % 3 == 2
    if best is None:
        raise InvalidArgumentError(f"the tokenizer makes no text of {length} tokens: send token ids (--prompts ids).")
    return best


async def fit_texts(codec: Codec, source: PromptSource, requests: Iterable[PlannedRequest]) -> list[TextPrompt]:
    """Return a text for each of the first `MOST_TEXTS` requests, made before the clock starts."""
    texts: list[TextPrompt] = []
    planned = islice(requests, MOST_TEXTS)
    while batch := list(islice(planned, _AT_ONCE)):
        texts += await asyncio.gather(*(fit_text(codec, source, each.index, each.prompt_len) for each in batch))
    return texts
