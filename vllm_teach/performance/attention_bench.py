"""`vllm-teach bench attention`: every usable backend against SDPA, and what a sparse pattern saves each of them.

All figures of one table come from one run and are compared as ratios within a round (`race`). Seconds are printed for
scale only: they belong to this machine at this hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import BlockSparsePattern, LocalWindow, Pattern
from vllm_teach.backends import AttentionSpec
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.memory import peak_memory
from vllm_teach.performance.side_by_side import race

_HEADS, _HEAD_DIM = 8, 64
_DENSITY = 0.25


@dataclass(frozen=True)
class Row:
    """One line of the table: what was run, its seconds, and its ratio to the baseline of the same round."""

    case: str
    backend: str
    baseline: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class MemoryRow:
    """Peak bytes of tensors that a call held beyond its arguments, and how many times less than naive's they are."""

    case: str
    backend: str
    peak_bytes: int
    naive_over_this: float


@dataclass(frozen=True)
class Bench:
    """The whole result: rows, rounds, and what it ran on."""

    rows: list[Row]
    memory: list[MemoryRow]
    rounds: int
    device: str
    environment: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


def bench_attention(*, rounds: int = 7, device: str = "cpu", scale: int = 1, progress: bool = True) -> Bench:
    """Measure the table. `scale` divides the sequence lengths (4,096 and 8,192 tokens), for a quick look or a test.

    Raises InvalidArgumentError for a `device` that is not there or `rounds` below 1.
    """
    from tqdm import tqdm

    n = 4096 // scale
    rows: list[Row] = []
    tasks = [
        partial(_against_sdpa, f"causal fp32, n = {n:,}", n, torch.float32, device),
        partial(_against_sdpa, f"causal bf16, n = {n:,}", n, torch.bfloat16, device),
        partial(_against_itself, f"{_DENSITY:.0%} block-sparse / dense, n = {n:,}", n, None, _blocks(n), device),
        partial(
            _against_itself,
            f"local {512 // scale} / causal, n = {2 * n:,}",
            2 * n,
            LocalWindow(-1, 0),
            LocalWindow(512 // scale - 1, 0),
            device,
        ),
        partial(_forward_and_backward, f"forward + backward, causal fp32, n = {n // 2:,}", n // 2, device),
    ]
    with tqdm(total=len(tasks) + 1, desc="bench attention", disable=not progress) as bar:
        for task in tasks:
            rows += task(rounds)
            bar.update()
        memory = list(_memory(n, device))
        bar.update()
    return Bench(rows, memory, rounds, device, asdict(describe_environment()))


def format_bench(bench: Bench) -> str:
    """Return the result as a table of plain text."""
    lines = [
        f"{_HEADS} heads, head_dim {_HEAD_DIM}, batch 1, {bench.device}; ratios within a round, "
        f"median of {bench.rounds} (lowest to highest); below 1 is faster than the baseline"
    ]
    case = ""
    for row in bench.rows:
        if row.case != case:
            case = row.case
            lines += ["", case]
        spread = f"({row.ratio_low:.2f} to {row.ratio_high:.2f})"
        lines.append(f"  {row.backend:<18}{row.ratio:7.2f} x {row.baseline:<12}{spread:<20}{row.seconds * 1e3:9.1f} ms")
    for held in bench.memory:
        if held.case != case:
            case = held.case
            lines += ["", case]
        lines.append(f"  {held.backend:<18}{held.peak_bytes / 1e6:9.1f} MB   naive / this = {held.naive_over_this:.1f}")
    return "\n".join(lines)


def _blocks(n: int) -> Pattern:
    block = max(1, n // 16)
    return BlockSparsePattern.random(16, block, density=_DENSITY, seed=0, causal=False)


def _qkv(n: int, dtype: torch.dtype, device: str, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, n, _HEADS, _HEAD_DIM, generator=generator) for _ in range(3)]
    return [tensor.to(device=device, dtype=dtype).requires_grad_(grad) for tensor in drawn]


def _serving(qkv: list[torch.Tensor], **arguments: object) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield each backend that can serve such a call on this machine, with the call."""
    spec = AttentionSpec.of(*qkv, **arguments)  # type: ignore[arg-type]
    for name in backends.names():
        backend = backends.get(name)
        if backend.unavailable() is None and backend.supports(spec) is None:
            yield name, partial(backend.run, *qkv, **arguments)  # type: ignore[arg-type]


def _against_sdpa(case: str, n: int, dtype: torch.dtype, device: str, rounds: int) -> list[Row]:
    with torch.inference_mode():
        return _race(case, dict(_serving(_qkv(n, dtype, device), causal=True)), "sdpa", device, rounds)


def _against_itself(case: str, n: int, dense: Pattern | None, sparse: Pattern, device: str, rounds: int) -> list[Row]:
    """Race each backend's sparse call against its own dense one; naive only shows that a mask alone saves nothing."""
    rows = []
    with torch.inference_mode():
        qkv = _qkv(n, torch.float32, device)
        whole = dict(_serving(qkv, pattern=dense))
        for name, call in _serving(qkv, pattern=sparse):
            if n > 4096 and name == "naive":
                continue  # its score matrices alone would be gigabytes
            found = _race(case, {"itself": whole[name], name: call}, "itself", device, rounds)
            rows += [row for row in found if row.backend == name]
    return rows


def _forward_and_backward(case: str, n: int, device: str, rounds: int) -> list[Row]:
    qkv = _qkv(n, torch.float32, device, grad=True)

    def both(call: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(call().sum(), qkv)

    runners = {name: partial(both, call) for name, call in _serving(qkv, causal=True)}
    return _race(case, runners, "sdpa", device, rounds)


def _race(case: str, runners: Mapping[str, Callable[[], object]], baseline: str, device: str, rounds: int) -> list[Row]:
    result = race(runners, baseline, rounds=rounds, device=device)
    return [
        Row(case, name, baseline, result.seconds[name].median, ratio.median, ratio.low, ratio.high)
        for name, ratio in result.ratios.items()
    ]


def _memory(n: int, device: str) -> Iterator[MemoryRow]:
    for case, grad in (
        (f"peak memory, forward, n = {n:,}", False),
        (f"peak memory, forward + backward, n = {n:,}", True),
    ):
        qkv = _qkv(n, torch.float32, device, grad)
        with torch.set_grad_enabled(grad):
            calls = dict(_serving(qkv, causal=True))
        peaks = {name: peak_memory(partial(_run, call, qkv, grad), device) for name, call in calls.items()}
        for name, peak in peaks.items():
            yield MemoryRow(case, name, peak, peaks["naive"] / peak)


def _run(call: Callable[[], torch.Tensor], qkv: list[torch.Tensor], grad: bool) -> object:
    with torch.set_grad_enabled(grad):
        out = call()
        return torch.autograd.grad(out.sum(), qkv) if grad else out
