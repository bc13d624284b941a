"""The table of products with quantised weights: who is in it, that all compute the same product, what they hold."""

import json
import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.quantized_matmul import rows
from vllm_teach.performance import linear_bench
from vllm_teach.performance.linear_bench import BASELINE, LinearBench, LinearShapes, bench_linear, format_linear

SMALL = LinearShapes(hidden=64, kv=32, inner=128, vocab=160, layers=2)
METHODS = [BASELINE, "int4", "int8", "int4 of PyTorch", "int8 of PyTorch"]


@cache
def bench() -> LinearBench:
    return bench_linear(rounds=2, tokens=(1, 3), shapes=SMALL, progress=False)


def test_every_method_is_in_every_case() -> None:
    found: dict[tuple[str, int], list[str]] = {}
    for row in bench().rows:
        found.setdefault((row.case, row.tokens), []).append(row.method)
    cases = ["64 -> 64", "64 -> 128", "128 -> 64", "64 -> 160"]
    assert found == {(case, tokens): METHODS for case in cases for tokens in (1, 3)} | {
        ("2 layers", tokens): METHODS[:3] for tokens in (1, 3)
    }


def test_ratios_are_to_the_baseline_of_the_same_round() -> None:
    for row in bench().rows:
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high
        assert row.seconds > 0
        if row.method == BASELINE:
            assert row.ratio_low == row.ratio_high == 1


def test_the_bytes_are_those_of_the_weights() -> None:
    held = {(row.case, row.method): row.weight_bytes for row in bench().rows}
    assert held["64 -> 160", BASELINE] == 64 * 160 * 2
    assert held["64 -> 64", BASELINE] == 2 * 64 * 64 * 2
    assert held["64 -> 160", "int8 of PyTorch"] == 64 * 160 + 160 * 2
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert held["2 layers", BASELINE] == 2 * 2 * layer
    assert 0.25 * held["2 layers", BASELINE] < held["2 layers", "int4"] < 0.29 * held["2 layers", BASELINE]


def test_all_methods_multiply_with_the_same_matrix() -> None:
    """The 8-bit ones with that of bfloat16, both 4-bit ones with the upper halves of its codes."""
    drawn = linear_bench._draw(128, 64, seed=3)
    methods = linear_bench._methods([drawn])
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = {name: method.products[0](x).double() for name, method in methods.items()}
    eight = (drawn.codes8.double() - 128) * drawn.scales8.double()
    four = ((drawn.codes8 // 16).double() - 8) * drawn.scales4.double().repeat_interleave(64, dim=1)
    assert (found["int8"] - found["int4"]).abs().max() > 0.05
    for name, value in found.items():
        torch.testing.assert_close(value, x.double() @ (four if "int4" in name else eight).T, rtol=0.02, atol=0.02)


def test_the_stack_computes_what_its_layers_say() -> None:
    stack = linear_bench._Stack(SMALL)
    x = linear_bench._input(3, 64)
    found = {name: run(x).double() for name, run in stack.runners().items()}
    dense = {name: weights[-1].double() for name, weights in stack._dense.items()}
    y = F.linear(F.linear(x.double(), dense["qkv"])[:, :64], dense["o"])
    expected = F.linear(F.silu(F.linear(y, dense["gate"])) * F.linear(y, dense["up"]), dense["down"])
    assert {name: value.shape for name, value in found.items()} == dict.fromkeys(METHODS[:3], (3, 64))
    torch.testing.assert_close(found[BASELINE], expected, rtol=0.05, atol=expected.abs().max().item() / 50)
    for bits, packed in stack._packed.items():
        weights = {name: rows(each[-1], torch.arange(each[-1].out_features)).double() for name, each in packed.items()}
        y = F.linear(F.linear(x.double(), weights["qkv"])[:, :64], weights["o"])
        gate, up = F.linear(y, weights["gate_up"]).chunk(2, dim=1)
        expected = F.linear(F.silu(gate) * up, weights["down"])
        torch.testing.assert_close(found[bits], expected, rtol=0.05, atol=expected.abs().max().item() / 50)


def test_the_table_prints_and_saves_every_row() -> None:
    text = format_linear(bench())
    assert text.count(" ms") == len(bench().rows)
    assert re.search(r"^64 -> 160, 3 tokens$", text, re.MULTILINE)
    saved = json.loads(json.dumps(bench().to_json()))
    assert len(saved["rows"]) == len(bench().rows)
    assert {"torch_threads", "packages"} <= set(saved["environment"])
    assert saved["shapes"]["vocab"] == 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 0}, r"rounds=0 measures nothing: use a whole number, 1 or more\."),
        ({"tokens": (1, 0)}, r"tokens=0 is nothing to multiply: use a whole number, 1 or more\."),
        *(
            ({"shapes": LinearShapes(**{name: 0})}, rf"shapes\.{name} is 0; give a whole number from 1\.")
            for name in ("hidden", "kv", "inner", "vocab", "layers")
        ),
        ({"shapes": LinearShapes(vocab=100)}, r"shapes\.vocab=100 is not valid: use a multiple of 16\."),
        ({"shapes": LinearShapes(hidden=100)}, r"shapes\.hidden=100 is not valid: use a multiple of 64\."),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        bench_linear(progress=False, **arguments)
