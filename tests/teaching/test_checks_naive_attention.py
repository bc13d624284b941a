"""Lesson 01's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.teaching import check


def attention_weights(q, k, scale):
    return torch.softmax(q @ k.T * scale, dim=-1)


def weights_by_the_package(q, k, scale):
    _, probs = naive_attention(q[None, :, None], k[None, :, None], k[None, :, None], scale=scale, return_probs=True)
    return probs[0, 0]


def causal_mask(q_len, kv_len):
    return torch.arange(kv_len) <= torch.arange(q_len)[:, None] + kv_len - q_len


def arithmetic_intensity(n, head_dim, width):
    return 4 * n * n * head_dim / ((4 * n * head_dim + 4 * n * n) * width)


def growth_order(cost):
    return math.log(cost(65_536) / cost(32_768)) / math.log(2)


def growth_from_differences(cost):
    one, two, four = cost(16_384), cost(32_768), cost(65_536)
    return math.log((four - two) / (two - one)) / math.log(2)


def unsafe_exp(q, k, scale):
    e = torch.exp(q @ k.T * scale)
    return e / e.sum(-1, keepdim=True)


def in_place(q, k, scale):
    return torch.softmax(q.mul_(scale) @ k.T, dim=-1)


def one_maximum_for_all_rows(q, k, scale):
    scores = q @ k.T * scale
    e = torch.exp(scores - scores.max())
    return e / e.sum(-1, keepdim=True)


RIGHT = {
    "attention_weights": [attention_weights, weights_by_the_package],
    "causal_mask": [causal_mask],
    "arithmetic_intensity": [arithmetic_intensity, lambda n, d, w: n * d / ((n + d) * w)],
    "growth_order": [growth_order, growth_from_differences],
}
WRONG = {
    "attention_weights": {
        "no scale": lambda q, k, s: torch.softmax(q @ k.T, -1),
        "scale after softmax": lambda q, k, s: torch.softmax(q @ k.T, -1) * s,
        "divided by scale": lambda q, k, s: torch.softmax(q @ k.T / s, -1),
        "always 1/sqrt(d)": lambda q, k, s: torch.softmax(q @ k.T / q.shape[1] ** 0.5, -1),
        "scaled twice": lambda q, k, s: torch.softmax(q @ k.T * s * s, -1),
        "wrong axis": lambda q, k, s: torch.softmax(q @ k.T * s, 0),
        "over everything": lambda q, k, s: torch.softmax((q @ k.T * s).flatten(), 0).view(len(q), len(k)),
        "transposed": lambda q, k, s: torch.softmax(k @ q.T * s, -1),
        "not transposed": lambda q, k, s: torch.softmax(q @ k * s, -1),
        "no softmax": lambda q, k, s: q @ k.T * s,
        "sigmoid": lambda q, k, s: torch.sigmoid(q @ k.T * s),
        "log_softmax": lambda q, k, s: torch.log_softmax(q @ k.T * s, -1),
        "exp without the maximum": unsafe_exp,
        "one maximum for all rows": one_maximum_for_all_rows,
        "float16": lambda q, k, s: torch.softmax((q.half() @ k.half().T).double() * s, -1),
        "float32": lambda q, k, s: torch.softmax(q.float() @ k.float().T * s, -1).double(),
        "float32 returned": lambda q, k, s: torch.softmax(q @ k.T * s, -1).float(),
        "3 x 3 only": lambda q, k, s: torch.softmax(q[:3] @ k[:3].T * s, -1),
        "causal": lambda q, k, s: torch.softmax((q @ k.T * s).masked_fill(~causal_mask(len(q), len(k)), -1e30), -1),
        "arguments swapped": lambda q, k, s: attention_weights(k, q, s),
        "inputs changed": in_place,
        "a list": lambda q, k, s: attention_weights(q, k, s).tolist(),
    },
    "causal_mask": {
        "top-left": lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(),
        "one too few": lambda q, k: torch.arange(k) < torch.arange(q)[:, None] + k - q,
        "one too many": lambda q, k: torch.arange(k) <= torch.arange(q)[:, None] + k - q + 1,
        "inverted": lambda q, k: ~causal_mask(q, k),
        "transposed": lambda q, k: causal_mask(k, q).T,
        "upper": lambda q, k: torch.ones(q, k, dtype=torch.bool).triu(k - q),
        "all": lambda q, k: torch.ones(q, k, dtype=torch.bool),
        "floats": lambda q, k: causal_mask(q, k).float(),
        "additive": lambda q, k: torch.zeros(q, k).masked_fill(~causal_mask(q, k), -torch.inf),
        "square only": lambda q, k: causal_mask(k, k),
        "offset never negative": lambda q, k: torch.arange(k) <= torch.arange(q)[:, None] + max(0, k - q),
        "lengths swapped": lambda q, k: causal_mask(k, q),
        "offset reversed": lambda q, k: torch.arange(k) <= torch.arange(q)[:, None] + q - k,
    },
    "arithmetic_intensity": {
        "one product": lambda n, d, w: arithmetic_intensity(n, d, w) / 2,
        "an addition is free": lambda n, d, w: 2 * n * n * d / ((4 * n * d + 4 * n * n) * w),
        "S and P never leave": lambda n, d, w: 4 * n * n * d / (4 * n * d * w),
        "S and P once": lambda n, d, w: 4 * n * n * d / ((4 * n * d + 2 * n * n) * w),
        "no P": lambda n, d, w: 4 * n * n * d / ((4 * n * d + 2 * n * n) * w),
        "no q, k, v, out": lambda n, d, w: 4 * n * n * d / (4 * n * n * w),
        "no out": lambda n, d, w: 4 * n * n * d / ((3 * n * d + 4 * n * n) * w),
        "per number": lambda n, d, w: arithmetic_intensity(n, d, 1),
        "always 16 bits": lambda n, d, w: arithmetic_intensity(n, d, 2),
        "bytes per FLOP": lambda n, d, w: 1 / arithmetic_intensity(n, d, w),
        "swapped": lambda n, d, w: arithmetic_intensity(d, n, 2 * w),
        "the limit": lambda n, d, w: d / w,
        "whole numbers": lambda n, d, w: 4 * n * n * d // ((4 * n * d + 4 * n * n) * w),
    },
    "growth_order": {
        "always quadratic": lambda cost: 2.0,
        "always linear": lambda cost: 1.0,
        "one measurement": lambda cost: math.log(cost(65_536)) / math.log(65_536),
        "small sizes": lambda cost: math.log(cost(128) / cost(64)) / math.log(2),
        "from 1 to the largest": lambda cost: math.log(cost(65_536) / cost(1)) / math.log(65_536),
        "medium sizes": lambda cost: math.log(cost(4096) / cost(2048)) / math.log(2),
        "no logarithm": lambda cost: cost(65_536) / cost(32_768),
        "half the ratio": lambda cost: cost(65_536) / cost(32_768) / 2,
        "size forgotten": lambda cost: math.log(cost(65_536) / cost(16_384)) / math.log(2),
        "natural logarithm": lambda cost: math.log(cost(65_536) / cost(32_768)),
        "rounded": lambda cost: round(growth_order(cost)),
        "upside down": lambda cost: math.log(cost(32_768) / cost(65_536)) / math.log(2),
        "read, not measured": lambda cost: cost.power,
        "read through the closure's names": lambda cost: vars(cost)["power"],
        "too large": lambda cost: math.log(cost(2_000_000) / cost(1_000_000)) / math.log(2),
        "too often": lambda cost: max(math.log(cost(2 * n) / cost(n), 2) for n in (4096, 8192, 16_384, 32_768)),
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


def test_too_many_measurements_and_too_large_sizes_are_explained():
    assert "6 measurements are allowed" in check.growth_order(WRONG["growth_order"]["too often"]).message
    assert "use a size between 1 and 65536" in check.growth_order(WRONG["growth_order"]["too large"]).message


def test_the_task_says_how_near_is_near_enough():
    assert "to within 0.05" in check.growth_order.task
    for case in check.growth_order.cases():
        assert check.growth_order._judge(lambda cost: growth_order(cost) + 0.2)[0] == "wrong", case.label


def test_what_the_learner_gets_has_nothing_to_read():
    for case in check.growth_order.cases():
        (given,) = case.fresh_arguments()
        assert vars(given) == {}


def test_a_long_text_is_not_said_to_be_memory_bound_everywhere():
    # In float32 with head_dim 64 the limit is 16 FLOP per byte: above a small processor's ridge, below a GPU's.
    assert "over a GPU's ridge" in check.arithmetic_intensity(arithmetic_intensity).message


def test_the_oracle_is_the_packages_attention():
    for case in check.attention_weights.cases():
        assert torch.allclose(weights_by_the_package(*case.arguments), case.expected, rtol=1e-9, atol=1e-12)
