"""Prompts of exact lengths, by the model's real tokenizer and by one that is awkward on purpose."""

import asyncio
from collections.abc import Sequence

import pytest

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_tokenizer
from vllm_teach.performance.load_test.plan import PlannedRequest
from vllm_teach.performance.load_test.prompts import PromptSource, fit_text, fit_texts, load_text_ids
from vllm_teach.performance.load_test.target import LocalCodec


def test_ids_are_exact_in_length_and_independent_of_the_order_in_which_they_are_asked_for() -> None:
    source = PromptSource(tuple(range(100, 200)), seed=4)
    assert [len(source.ids(0, length)) for length in (1, 2, 3, 50, 333)] == [1, 2, 3, 50, 333]
    forwards = [source.ids(index, 20) for index in range(5)]
    assert [source.ids(index, 20) for index in reversed(range(5))] == forwards[::-1]
    assert set(source.ids(0, 333)) <= set(range(100, 200))
    assert source.ids(0, 20) != PromptSource(source.text_ids, seed=5).ids(0, 20)


def test_prompts_share_the_prefix_that_is_asked_for_and_none_by_chance() -> None:
    """With a text of 40 tokens, 200 pieces of it alone would begin alike by the dozen."""
    source = PromptSource(tuple(range(40)), shared_prefix=16)
    prompts = [source.ids(index, 48) for index in range(200)]
    assert {tuple(prompt[:16]) for prompt in prompts} == {tuple(range(16))}
    assert len({tuple(prompt[16:22]) for prompt in prompts}) > 190
    assert source.ids(0, 10) == list(range(10))


def test_texts_have_exactly_the_tokens_that_the_models_tokenizer_counts() -> None:
    tokenizer = load_tokenizer(data.path("tiny-llama"))
    codec = LocalCodec(tokenizer)
    source = PromptSource(asyncio.run(load_text_ids(codec)))
    requests = [PlannedRequest(index, None, 3 + 11 * index, 1) for index in range(40)]
    texts = asyncio.run(fit_texts(codec, source, requests))
    counts = [len(tokenizer.encode(text.text, add_special_tokens=False)) for text in texts]
    assert counts == [text.num_tokens for text in texts] == [request.prompt_len for request in requests]
    assert len({text.text for text in texts}) == 40


class Awkward:
    """Makes one token of each pair of the same letters: what was cut from ids comes back shorter."""

    async def encode(self, text: str) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            pair = text[place : place + 2]
            double = len(pair) == 2 and pair[0] == pair[1]
            ids.append(ord(text[place]) + (1000 if double else 0))
            place += 2 if double else 1
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 1000) * 2 if token >= 1000 else chr(token) for token in ids)


def test_a_text_that_shrinks_when_it_is_encoded_again_is_made_anew() -> None:
    codec = Awkward()
    source = PromptSource(tuple(map(ord, "aaabbcaabaacbbbcc")))  # single letters, many of which will pair up
    for index in range(30):
        text = asyncio.run(fit_text(codec, source, index, 25))
        assert text.num_tokens == len(asyncio.run(codec.encode(text.text)))
        assert abs(text.num_tokens - 25) <= 1
    exact = [asyncio.run(fit_text(codec, source, index, 25)).num_tokens == 25 for index in range(30)]
    assert sum(exact) >= 29


class Even(Awkward):
    """Counts letters, but always an even number where the first is an "a": from there 25 tokens cannot be had."""

    async def encode(self, text: str) -> list[int]:
        return [*map(ord, text), *([0] if text.startswith("a") and len(text) % 2 else [])]


def test_where_one_place_has_no_such_text_another_is_taken() -> None:
    source = PromptSource(tuple(map(ord, "abcd")))
    texts = [asyncio.run(fit_text(Even(), source, index, 25)) for index in range(40)]
    assert any(source.ids(index, 25)[0] == ord("a") for index in range(40))
    assert {text.num_tokens for text in texts} == {25}


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="text_ids is empty"):
        PromptSource(())
    with pytest.raises(InvalidArgumentError, match="shared_prefix=-1"):
        PromptSource((1,), shared_prefix=-1)
