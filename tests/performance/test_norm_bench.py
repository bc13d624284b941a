"""The table of norms: every way in every case computes the same, and the ratios mean what they say."""

import json

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import norm_bench
from vllm_teach.performance.norm_bench import NormBench, bench_norms, format_norms

CASES = [
    f"{name}, {dtype}"
    for dtype in ("float32", "bfloat16")
    for name in ("LayerNorm", "residual + LayerNorm", "RMSNorm", "residual + RMSNorm")
]


@pytest.fixture(scope="module")
def bench() -> NormBench:
    return bench_norms(tokens=16, size=64, rounds=2, progress=False)


def test_every_case_has_three_ways(bench: NormBench) -> None:
    assert list(bench.paths) == CASES
    for case in CASES:
        rows = [row for row in bench.rows if row.case == case]
        assert len(rows) == 3
        assert rows[0].way == "ours"
        assert rows[0].ratio == 1
        assert all(0 < row.ratio_low <= row.ratio <= row.ratio_high for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_of_a_case_compute_the_same(dtype: torch.dtype) -> None:
    tensors = norm_bench.norm_tensors((16, 64), dtype, "cpu")
    for ways in norm_bench.norm_cases(*tensors).values():
        first, *others = (way() for way in ways.values())
        for other in others:
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(other, first, rtol=tolerance, atol=tolerance)


def test_the_table(bench: NormBench) -> None:
    text = format_norms(bench)
    assert text.startswith("16 x 64 on cpu")
    assert text.count("x ours") == 2 * len(CASES)
    for case in CASES:
        assert f"\n{case}\n" in text
    assert json.loads(json.dumps(bench.to_json()))["paths"] == bench.paths


@pytest.mark.parametrize("argument", ["tokens", "size", "rounds"])
def test_numbers_below_1(argument: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{argument}"):
        bench_norms(**{argument: 0}, progress=False)
