"""`vllm-teach bench norms`: our LayerNorm and RMSNorm against PyTorch's, and against one operation after another.

All figures of one case come from one run and are compared as ratios within a round (`race`). Every call makes new
tensors; where the C library takes fresh pages for them, as glibc does for 16 MB, touching these for the first time
takes longer than the norm itself and hides the ratio. With `MALLOC_MMAP_THRESHOLD_=1073741824` and
`MALLOC_TRIM_THRESHOLD_=4294967296` in the environment glibc keeps its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.attention.shapes import check_count
from vllm_teach.kernels import norms
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.timing import check_calls, device_name

EPS = 1e-5
OURS = "ours"


@dataclass(frozen=True)
class NormRow:
    """One way to compute one case: its seconds, and how many times as long as ours it takes in the same round."""

    case: str
    way: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class NormBench:
    """The whole result; `paths` says for each case what computes ours, and why."""

    rows: list[NormRow]
    paths: dict[str, str]
    tokens: int
    size: int
    rounds: int
    device: str
    environment: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


def bench_norms(
    *, tokens: int = 2048, size: int = 2048, rounds: int = 15, device: str = "cpu", progress: bool = True
) -> NormBench:
    """Measure norms of `[tokens, size]`, in float32 and bfloat16, with and without a residual addition before them.

    The first call builds the kernel where it is not there yet. Raises InvalidArgumentError for a `device` that is not
    there, and for numbers below 1.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    device = device_name(device, "clock")
    shape = check_count("tokens", tokens, 1), check_count("size", size, 1)
    rows: list[NormRow] = []
    paths: dict[str, str] = {}
    with torch.inference_mode(), tqdm(total=8, desc="bench norms", disable=not progress) as bar:
        for dtype in (torch.float32, torch.bfloat16):
            x, residual, weight, bias = norm_tensors(shape, dtype, device)
            for name, ways in norm_cases(x, residual, weight, bias).items():
                case = f"{name}, {str(dtype).removeprefix('torch.')}"
                bar.set_postfix_str(case)
                kind = "rms_norm" if "RMSNorm" in name else "layer_norm"
                rows += _race(case, ways, rounds, device)
                paths[case] = str(norms.explain(kind, x, weight))  # certain only now: the kernel is built, or is not
                bar.update()
    return NormBench(rows, paths, *shape, rounds, device, asdict(describe_environment()))


def format_norms(bench: NormBench) -> str:
    """Return the result as a table of plain text."""
    lines = [
        f"{bench.tokens:,} x {bench.size:,} on {bench.device}; ratios within a round, median of {bench.rounds} "
        "(lowest to highest); above 1, ours is faster"
    ]
    case = ""
    for row in bench.rows:
        if row.case != case:
            case = row.case
            lines += ["", case, f"  {OURS:<24}{'':<30}{row.seconds * 1e3:9.2f} ms   {bench.paths[case]}"]
        if row.way != OURS:
            spread = f"({row.ratio_low:.2f} to {row.ratio_high:.2f})"
            lines.append(f"  {row.way:<24}{row.ratio:7.2f} x ours {spread:<16}{row.seconds * 1e3:9.2f} ms")
    return "\n".join(lines)


def layer_norm_by_operations(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    """Return the LayerNorm of `x` `[..., size]` as one writes it down: each operation reads and writes the tensor."""
    centered = x - x.mean(dim=-1, keepdim=True)
    variance = centered.pow(2).mean(dim=-1, keepdim=True)
    return centered * torch.rsqrt(variance + eps) * weight + bias


def rms_norm_by_operations(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """Return the RMSNorm of `x` `[..., size]` as transformers' Llama writes it down."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def norm_tensors(shape: tuple[int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return x and a residual of `shape` `[tokens, size]`, a weight and a bias `[size]`: the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator) for size in (shape, shape, shape[-1:], shape[-1:])]
    return [tensor.to(device=device, dtype=dtype) for tensor in drawn]


def norm_cases(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """Return for each case the ways to compute it: ours, PyTorch's, one operation after another."""
    size = x.shape[-1:]

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, size, weight, bias, EPS)

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, size, weight, EPS)

    def added(norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total), total

    by_operations = partial(layer_norm_by_operations, weight=weight, bias=bias)
    rms_by_operations = partial(rms_norm_by_operations, weight=weight)
    return {
        "LayerNorm": {
            OURS: partial(norms.layer_norm, x, weight, bias, EPS),
            "F.layer_norm": partial(layer_norm, x),
            "by operations": partial(by_operations, x),
        },
        "residual + LayerNorm": {
            OURS: partial(norms.add_layer_norm, x, residual, weight, bias, EPS),
            "add, F.layer_norm": partial(added, layer_norm),
            "add, by operations": partial(added, by_operations),
        },
        "RMSNorm": {
            OURS: partial(norms.rms_norm, x, weight, EPS),
            "F.rms_norm": partial(rms_norm, x),
            "by operations": partial(rms_by_operations, x),
        },
        "residual + RMSNorm": {
            OURS: partial(norms.add_rms_norm, x, residual, weight, EPS),
            "add, F.rms_norm": partial(added, rms_norm),
            "add, by operations": partial(added, rms_by_operations),
        },
    }


def _race(case: str, ways: Mapping[str, Callable[[], object]], rounds: int, device: str) -> list[NormRow]:
    found = race(ways, OURS, rounds=rounds, warmup=2, device=device)
    return [
        NormRow(case, way, found.seconds[way].median, ratio.median, ratio.low, ratio.high)
        for way, ratio in found.ratios.items()
    ]
