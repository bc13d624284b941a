"""Lesson 00's checks: the right answers pass, and each known-wrong one is rejected."""

import pytest
import torch

from vllm_teach.teaching import check


def next_token(logits):
    return int(logits[-1].argmax())


def kv_bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_number):
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_number


def tokens_computed(prompt_len, new_tokens, cached):
    if new_tokens == 0:
        return 0
    return prompt_len + new_tokens - 1 if cached else sum(prompt_len + i for i in range(new_tokens))


def in_place(logits):
    logits[:-1] = -torch.inf
    return logits[-1].argmax()


WRONG_NEXT_TOKEN = {
    "first row": lambda logits: int(logits[0].argmax()),
    "all rows": lambda logits: int(logits.argmax()),
    "over the tokens": lambda logits: int(logits[:, -1].argmax()),
    "least likely": lambda logits: int(logits[-1].argmin()),
    "the value": lambda logits: float(logits[-1].max()),
    "one per row": lambda logits: logits.argmax(-1),
    "shape [1]": lambda logits: logits[-1:].argmax(-1),
    "largest magnitude": lambda logits: int(logits[-1].abs().argmax()),
    "sampled": lambda logits: int(torch.multinomial(logits[-1].softmax(-1), 1)),
    "mean over rows": lambda logits: int(logits.mean(0).argmax()),
    "inputs changed": in_place,
}
WRONG_KV_BYTES = {
    "keys only": lambda n, h, d, b: n * h * d * b,
    "numbers, not bytes": lambda n, h, d, b: 2 * n * h * d,
    "one layer": lambda n, h, d, b: 2 * h * d * b,
    "one head": lambda n, h, d, b: 2 * n * d * b,
    "no head_dim": lambda n, h, d, b: 2 * n * h * b,
    "always 16 bits": lambda n, h, d, b: 4 * n * h * d,
    "32 heads": lambda n, h, d, b: 2 * n * 32 * d * b,
    "KiB": lambda n, h, d, b: 2 * n * h * d * b / 1024,
    "bits": lambda n, h, d, b: 16 * n * h * d * b,
}
WRONG_TOKENS_COMPUTED = {
    "last token too": lambda p, n, c: p + n if c else sum(p + i + 1 for i in range(n)),
    "cache ignored": lambda p, n, c: sum(p + i for i in range(n)),
    "cache always": lambda p, n, c: p + n - 1 if n else 0,
    "swapped": lambda p, n, c: tokens_computed(p, n, not c),
    "new tokens only": lambda p, n, c: n,
    "prompt each step": lambda p, n, c: p + n - 1 if c else p * n,
    "nothing asked": lambda p, n, c: p + n - 1 if c else sum(p + i for i in range(n)),
    "arguments swapped": lambda p, n, c: tokens_computed(n, p, c),
    "square": lambda p, n, c: p + n - 1 if c else (p + n) ** 2 // 2,
}


def test_the_task_mentions_that_no_new_token_costs_nothing():
    assert "Asked for no new token, it computes nothing." in check.tokens_computed.task
    assert any(case.arguments[1] == 0 for case in check.tokens_computed.cases())


@pytest.mark.parametrize("answer", [next_token, kv_bytes_per_token, tokens_computed], ids=lambda f: f.__name__)
def test_right(answer):
    result = getattr(check, answer.__name__)(answer)
    assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        pytest.param(name, answer, id=f"{name}: {what}")
        for name, wrong in (
            ("next_token", WRONG_NEXT_TOKEN),
            ("kv_bytes_per_token", WRONG_KV_BYTES),
            ("tokens_computed", WRONG_TOKENS_COMPUTED),
        )
        for what, answer in wrong.items()
    ],
)
def test_wrong(name, answer):
    torch.manual_seed(0)
    assert getattr(check, name)(answer).status in ("wrong", "error")
