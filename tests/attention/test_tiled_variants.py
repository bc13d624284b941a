"""Random calls with every feature there is: the tiled loops, forward and backward, against autograd through naive."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.tiled import flash_attention, flash_attention_forward

PATTERNS = [LocalWindow(5, 2), ~Causal(), Causal() & ~LocalWindow(3, 0), LocalWindow(2, 0) | ~LocalWindow(20, 20)]


@dataclass(frozen=True, eq=False)
class Case:
    seed: int
    sizes: tuple[int, int, int, int, int, int]  # batch, q_len, kv_len, q_heads, kv_heads, head_dim
    tiles: dict[str, int]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.seed}-" + "-".join(map(str, self.sizes)) + "-" + "-".join(self.arguments)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    tile_q, tile_k = rng.choice([1, 7, 16, 32]), rng.choice([1, 7, 16, 32])
    q_len = rng.choice([0, 1, rng.randint(1, tile_q), 2 * tile_q + rng.randint(-1, 1), rng.randint(1, 70)])
    kv_len = rng.choice([0, 1, q_len, q_len, 2 * tile_k + rng.randint(-1, 1), rng.randint(1, 70)])
    q_heads, kv_heads = rng.choice([(1, 1), (2, 2), (6, 3), (4, 1)])
    batch = rng.randint(1, 3)
    slopes = torch.rand((batch, q_heads) if rng.random() < 0.5 else (q_heads,), generator=torch.Generator())
    features: dict[str, Any] = {
        "causal": True,
        "window_size": (rng.randint(-1, 20), rng.randint(-1, 20)),
        "pattern": rng.choice(PATTERNS),
        "softcap": rng.choice([0.5, 3.0]),
        "alibi_slopes": slopes,
        "dropout_p": rng.choice([0.1, 0.5]),
        "scale": rng.choice([0.0, -0.3, 1.0]),
    }
    arguments = {name: value for name, value in features.items() if rng.random() < 0.35}
    if "dropout_p" in arguments:
        arguments |= {"dropout_seed": rng.randrange(2**64), "first_batch": rng.choice([0, 5])}
    sizes = (batch, q_len, kv_len, q_heads, kv_heads, rng.choice([1, 8, 24]))
    return Case(seed, sizes, {"tile_q": tile_q, "tile_k": tile_k}, arguments)


CASES = [random_case(seed) for seed in range(160)]


def draw(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """q, k and v, and the derivatives of a loss by out and by lse."""
    batch, q_len, kv_len, q_heads, kv_heads, head_dim = case.sizes
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [(q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, q_heads)]
    *qkv, dout = [torch.randn(batch, n, h, head_dim, generator=generator).to(dtype) for n, h in sizes]
    return [t.requires_grad_() for t in qkv], dout, torch.randn(batch, q_heads, q_len, generator=generator)


def results_and_gradients(attend, qkv, dout, dlse, **arguments) -> list[torch.Tensor]:
    out, lse = attend(*qkv, return_lse=True, **arguments)
    seeing = lse.masked_fill(lse.isinf(), 0)  # a loss must not meet the -inf of a row that sees no key
    gradients = torch.autograd.grad([out, seeing], qkv, [dout, dlse.to(lse.dtype)])
    return [out.detach(), lse.detach(), *gradients]


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; both must be infinite in the same places, and nowhere NaN."""
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite)
    difference = (actual.double() - expected.double())[~infinite].abs()
    assert not difference.isnan().any()
    return difference.max().item() if difference.numel() else 0.0


def test_the_random_cases_cover_what_they_must():
    required = {
        **{
            name: (lambda c, name=name: name in c.arguments)
            for name in ("causal", "window_size", "pattern", "softcap", "alibi_slopes", "dropout_p", "scale")
        },
        "two masks": lambda c: "causal" in c.arguments and "pattern" in c.arguments,
        "softcap and alibi": lambda c: "softcap" in c.arguments and "alibi_slopes" in c.arguments,
        "dropout and a mask": lambda c: "dropout_p" in c.arguments and "causal" in c.arguments,
        "no queries": lambda c: c.sizes[1] == 0,
        "no keys": lambda c: c.sizes[2] == 0,
        "blind rows": lambda c: "causal" in c.arguments and c.sizes[1] > c.sizes[2] > 0,
        "fewer queries than keys": lambda c: c.sizes[1] < c.sizes[2],
        "GQA": lambda c: c.sizes[3:5] == (6, 3),
        "MQA": lambda c: c.sizes[3:5] == (4, 1),
    }
    assert {name: sum(map(matches, CASES)) >= 5 for name, matches in required.items()} == dict.fromkeys(required, True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_equal_those_of_naive(case):
    found = results_and_gradients(flash_attention, *draw(case), **case.tiles, **case.arguments)
    expected = results_and_gradients(naive_attention, *draw(case), **case.arguments)
    for actual, exact in zip(found, expected, strict=True):
        assert max_error(actual, exact) <= 1e-10
        assert actual.dtype == torch.float64


def leaves_only_rounding(case: Case) -> bool:
    """One key and dropout: dS is exactly 0 in naive; here it is what rounding out to 16 bits left in D."""
    return case.sizes[2] == 1 and "dropout_p" in case.arguments


@pytest.mark.parametrize("case", [case for case in CASES[::2] if not leaves_only_rounding(case)], ids=str)
def test_in_low_precision_errors_stay_within_those_of_the_plain_implementation(case):
    """Twice the plain implementation's for the results, three times for the gradients, as FlashAttention's tests."""
    for dtype in (torch.float16, torch.bfloat16):
        qkv, dout, dlse = draw(case, dtype)
        double = [t.detach().double().requires_grad_() for t in qkv]
        exact = results_and_gradients(naive_attention, double, dout.double(), dlse, **case.arguments)
        plain = results_and_gradients(naive_attention, qkv, dout, dlse, **case.arguments)
        found = results_and_gradients(flash_attention, qkv, dout, dlse, **case.tiles, **case.arguments)
        for i, (ours, theirs, truth) in enumerate(zip(found, plain, exact, strict=True)):
            size = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
            factor, slack = (2, 1e-5) if i < 2 else (3, 1e-4 * size)
            assert max_error(ours, truth) <= factor * max_error(theirs, truth) + slack, (dtype, i)
            assert ours.dtype == (torch.float32 if i == 1 else dtype)


@pytest.mark.parametrize("case", CASES[::8], ids=str)
def test_the_function_gives_what_the_forward_gives(case):
    qkv, _, _ = draw(case)
    arguments = {**case.tiles, **case.arguments}
    out, lse = flash_attention_forward(*[t.detach() for t in qkv], **arguments)
    assert torch.equal(flash_attention(*qkv, **arguments), out)
    assert torch.equal(flash_attention(*qkv, return_lse=True, **arguments)[1], lse)
