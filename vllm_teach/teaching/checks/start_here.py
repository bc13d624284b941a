"""Checks of lesson 00: the last row of the logits, the bytes a token leaves behind, the work a cache saves."""

from collections.abc import Iterator

import torch

from vllm_teach.teaching.exercises import Case, Check

LESSON = "00_start_here"


def _next_token_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The last row of the logits scores what comes after the whole text; the most likely token has its largest."
    for tokens, vocabulary in ((1, 5), (4, 7), (6, 32), (33, 257), (3, 3)):
        # A permutation: no ties, so that there is one right answer.
        logits = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(tokens)]).double()
        logits = logits - vocabulary / 2
        best = max(range(vocabulary), key=lambda token: float(logits[-1, token]))
        yield Case(f"{tokens} tokens, vocabulary {vocabulary}", (logits,), best, rule)
    below_zero = torch.tensor([[9.0, 8.0, 7.0], [-3.0, -2.0, -1.5]], dtype=torch.float64)
    yield Case("all logits of the last row below zero", (below_zero,), 2, rule)


def _kv_bytes_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Each layer keeps one key and one value per KV head: two vectors of head_dim numbers."
    known = (("Llama-2-7B in 16 bits", 32, 32, 128, 2), ("SmolLM2-135M in 32 bits", 30, 3, 64, 4))
    for label, layers, kv_heads, head_dim, width in known:
        yield Case(label, (layers, kv_heads, head_dim, width), 2 * layers * kv_heads * head_dim * width, rule)
    for _ in range(4):
        layers, kv_heads, head_dim = (int(torch.randint(1, 90, (), generator=generator)) for _ in range(3))
        width = (1, 2, 4, 8)[int(torch.randint(0, 4, (), generator=generator))]
        label = f"{layers} layers, {kv_heads} KV heads of {head_dim}, {width} bytes a number"
        # Counted, one vector at a time, instead of the product.
        expected = sum(head_dim * width for _ in range(layers) for _ in range(kv_heads) for _ in ("key", "value"))
        yield Case(label, (layers, kv_heads, head_dim, width), expected, rule)


def _tokens_computed_cases(generator: torch.Generator) -> Iterator[Case]:
    rules = {
        True: "With a cache the first step computes the prompt, and each later step the one token before it.",
        False: "Without a cache each step computes the whole text so far again.",
    }
    pairs = [(5, 1), (1, 4), (10, 3), (7, 0)]
    pairs += [tuple(torch.randint(1, 60, (2,), generator=generator).tolist()) for _ in range(3)]
    for prompt_len, new_tokens in pairs:
        for cached in (True, False):
            expected, text_len, computed_before = 0, prompt_len, 0
            for _ in range(new_tokens):  # replay the steps
                expected += text_len - computed_before
                computed_before = text_len if cached else 0
                text_len += 1
            label = f"prompt {prompt_len}, {new_tokens} new tokens, {'with' if cached else 'no'} cache"
            yield Case(label, (prompt_len, new_tokens, cached), expected, rules[cached])


CHECKS = [
    Check(
        name="next_token",
        lesson=LESSON,
        task="Return the most likely next token's id, given the logits [tokens, vocabulary] of a text.",
        lesson_learnt="Greedy decoding reads one row: the last.",
        cases=_next_token_cases,
        hints=(
            "Row i of the logits scores the token after token i. Which row scores the one that does not exist yet?",
            "logits[-1] is that row; its largest entry's position is the token's id.",
            "torch.argmax gives a position, torch.max of a tensor gives a value.",
        ),
    ),
    Check(
        name="kv_bytes_per_token",
        lesson=LESSON,
        task="Return how many bytes one token occupies in the KV cache, over all layers.",
        lesson_learnt="Multiply it by the context and by the requests: that is what fills a GPU.",
        cases=_kv_bytes_cases,
        hints=(
            "Follow one token through one layer: which vectors of it will later tokens read?",
            "A key and a value for each KV head; head_dim numbers in each.",
            "For Llama-2-7B in 16 bits the answer is 524,288 bytes, 512 KiB. Which factor is missing?",
        ),
    ),
    Check(
        name="tokens_computed",
        lesson=LESSON,
        task="Return how many tokens the model computes in all to generate new_tokens after a prompt. "
        "Asked for no new token, it computes nothing.",
        lesson_learnt="Without a cache the work grows with the square of the text; with it, with its length.",
        cases=_tokens_computed_cases,
        hints=(
            "Write down, for a prompt of 5 and 3 new tokens, how long the text is at the start of each step.",
            "The last new token is returned and never goes through the model.",
            "With the cache: prompt_len + new_tokens - 1, but nothing at all when no token is asked for.",
            "Without: prompt_len + (prompt_len + 1) + …, one term per new token.",
        ),
    ),
]
