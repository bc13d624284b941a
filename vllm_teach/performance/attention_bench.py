"""`vllm-teach bench attention`: every usable backend against SDPA, and what a sparse pattern saves each of them.

All figures of one table come from one run and are compared as ratios within a round (`race`). Seconds are printed for
scale only: they belong to this machine at this hour. A backend that is not in a case is listed with the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import BlockSparsePattern, LocalWindow, Pattern
from vllm_teach.attention.shapes import check_count
from vllm_teach.backends import AttentionSpec
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.backends.selection import refusals
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.kernel_failure import why_failed
from vllm_teach.performance.memory import peak_memory
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.timing import check_calls, device_name

_HEADS, _HEAD_DIM = 8, 64
_DENSITY, _GRID = 0.25, 16  # of the block-sparse pattern: the share of its _GRID x _GRID blocks that is seen
_LARGEST_SCALE = 256  # leaves the pattern one token a block
_LONGEST_NAIVE = 4096  # beyond it, the score matrices alone are gigabytes
_CASES = 7

_Calls = dict[str, Callable[[], object]]


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
    """Peak bytes of tensors that a call held beyond its arguments, and how many times less than naive's they are.

    `naive_over_this` is None where naive failed.
    """

    case: str
    backend: str
    peak_bytes: int
    naive_over_this: float | None


@dataclass(frozen=True)
class LeftOut:
    """A backend that a case has no figures of, and why."""

    case: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """The whole result: rows, what has none, rounds, and what it ran on."""

    rows: list[Row]
    memory: list[MemoryRow]
    left_out: list[LeftOut]
    rounds: int
    device: str
    environment: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


def bench_attention(*, rounds: int = 7, device: str = "cpu", scale: int = 1, progress: bool = True) -> Bench:
    """Measure the table. `scale` divides the sequence lengths (4,096 and 8,192 tokens), for a quick look or a test.

    The first call of a backend may build or compile it, for some seconds: the progress bar names whom it waits for.
    Raises InvalidArgumentError for a `device` that is not there, `rounds` below 1 or a `scale` out of 1 … 256.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    device = device_name(device, "clock")
    if check_count("scale", scale, 1) > _LARGEST_SCALE:
        raise InvalidArgumentError(f"scale is {scale}; give a whole number from 1 to {_LARGEST_SCALE}.")
    n, window = 4096 // scale, 512 // scale
    blocks, local = _blocks(n), LocalWindow(window - 1, 0)
    with tqdm(total=_CASES, desc="bench attention", disable=not progress) as bar:
        bench = _Bench(device, rounds, lambda text: bar.set_postfix_str(text))
        for task in (
            partial(bench.against_sdpa, f"causal fp32, n = {n:,}", n, torch.float32),
            partial(bench.against_sdpa, f"causal bf16, n = {n:,}", n, torch.bfloat16),
            partial(bench.against_itself, f"{_DENSITY:.0%} block-sparse / dense, n = {n:,}", n, None, blocks),
            partial(bench.against_itself, f"local {window} / causal, n = {2 * n:,}", 2 * n, LocalWindow(-1, 0), local),
            partial(bench.forward_and_backward, f"forward + backward, causal fp32, n = {n // 2:,}", n // 2),
            partial(bench.peak_memory, f"peak memory, forward, n = {n:,}", n, False),
            partial(bench.peak_memory, f"peak memory, forward + backward, n = {n:,}", n, True),
        ):
            task()
            bar.update()
    return Bench(bench.rows, bench.memory, bench.left_out, rounds, device, asdict(describe_environment()))


@dataclass
class _Bench:
    """The table while it grows. `tell` is called with a few words before each step that may take long."""

    device: str
    rounds: int
    tell: Callable[[str], object]
    rows: list[Row] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def against_sdpa(self, case: str, n: int, dtype: torch.dtype) -> None:
        """Race all backends without gradients."""
        with torch.inference_mode():
            self._race(case, self._started(case, self._serving(case, self._qkv(n, dtype), causal=True)))

    def against_itself(self, case: str, n: int, dense: Pattern | None, sparse: Pattern) -> None:
        """Race each backend's sparse call against its own dense one: a mask that saves nothing gives 1."""
        with torch.inference_mode():
            qkv = self._qkv(n, torch.float32)
            calls = self._serving(case, qkv, pattern=sparse)
            if n > _LONGEST_NAIVE and "naive" in calls:
                del calls["naive"]
                held = _HEADS * n * n * 4 / 1e9
                self.left_out.append(LeftOut(case, "naive", f"Its scores alone would take {held:.1f} GB."))
            for name, call in self._started(case, calls).items():
                whole = partial(backends.get(name).run, *qkv, pattern=dense)
                self._race(case, {name: call, "itself": whole}, baseline="itself", warmup=1)

    def forward_and_backward(self, case: str, n: int) -> None:
        """Race all backends that have gradients, each with a backward pass of its own."""
        qkv = self._qkv(n, torch.float32, grad=True)
        calls = self._serving(case, qkv, causal=True)
        self._race(case, self._started(case, {name: partial(_backward, call, qkv) for name, call in calls.items()}))

    def peak_memory(self, case: str, n: int, grad: bool) -> None:
        """Count the bytes that each backend holds."""
        qkv = self._qkv(n, torch.float32, grad)
        peaks = {}
        with torch.set_grad_enabled(grad):
            for name, call in self._serving(case, qkv, causal=True).items():
                self.tell(f"{case}: {name}")
                try:
                    peaks[name] = peak_memory(partial(_backward, call, qkv) if grad else call, self.device)
                except Exception as error:
                    if not self._leave_out(case, name, error):
                        raise
        naive = peaks.get("naive")
        for name, peak in peaks.items():
            self.memory.append(MemoryRow(case, name, peak, naive / peak if naive and peak else None))

    def _qkv(self, n: int, dtype: torch.dtype, grad: bool = False) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(1, n, _HEADS, _HEAD_DIM, generator=generator) for _ in range(3)]
        return [tensor.to(device=self.device, dtype=dtype).requires_grad_(grad) for tensor in drawn]

    def _serving(self, case: str, qkv: list[torch.Tensor], **arguments: object) -> _Calls:
        """Return the call of each backend that can serve it on this machine; note why the others cannot."""
        refused = refusals(AttentionSpec.of(*qkv, **arguments), detect_hardware())  # type: ignore[arg-type]
        self.left_out += [LeftOut(case, name, reason) for name, reason in refused.items()]
        able = [name for name in backends.names() if name not in refused]
        return {name: partial(backends.get(name).run, *qkv, **arguments) for name in able}  # type: ignore[arg-type]

    def _started(self, case: str, calls: _Calls) -> _Calls:
        """Call each once, which builds, compiles and warms up; return those that worked, and note the others."""
        working = {}
        for name, call in calls.items():
            self.tell(f"{case}: {name} starts")
            try:
                call()
            except Exception as error:
                if not self._leave_out(case, name, error):
                    raise
            else:
                working[name] = call
        return working

    def _leave_out(self, case: str, name: str, error: Exception) -> bool:
        """Note why a backend failed that serves such a call in principle; return False if `error` is a fault."""
        reason = why_failed(error)
        if reason is None:
            return False
        if isinstance(error, MissingDependencyError):
            detect_hardware.cache_clear()  # the backend says by itself from now on that it is unavailable
        self.left_out.append(LeftOut(case, name, reason))
        return True

    def _race(self, case: str, calls: _Calls, baseline: str = "sdpa", warmup: int = 0) -> None:
        if baseline not in calls:
            self.left_out += [LeftOut(case, name, f"There is no {baseline} to compare it with.") for name in calls]
            return
        result = race(
            calls,
            baseline,
            rounds=self.rounds,
            warmup=warmup,
            device=self.device,
            announce=lambda name: self.tell(f"{case}: {name}"),
        )
        for name, ratio in result.ratios.items():
            if name != "itself":
                seconds = result.seconds[name].median
                self.rows.append(Row(case, name, baseline, seconds, ratio.median, ratio.low, ratio.high))


def _blocks(n: int) -> Pattern:
    return BlockSparsePattern.random(_GRID, n // _GRID, density=_DENSITY, seed=0, causal=False)


def _backward(call: Callable[[], object], qkv: list[torch.Tensor]) -> object:
    out = call()
    assert isinstance(out, torch.Tensor)
    return torch.autograd.grad(out.sum(), qkv)


def format_bench(bench: Bench) -> str:
    """Return the result as a table of plain text, and below it the backends that have no figures, with the reason."""
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
        times = "unknown" if held.naive_over_this is None else f"{held.naive_over_this:.1f}"
        lines.append(f"  {held.backend:<18}{held.peak_bytes / 1e6:9.1f} MB   naive / this = {times}")
    return "\n".join(lines + _format_left_out(bench.left_out))


def _format_left_out(left_out: list[LeftOut]) -> list[str]:
    """Return a line for each backend and reason, and the cases where it is the reason."""
    if not left_out:
        return []
    cases: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        cases.setdefault((one.backend, one.reason), []).append(one.case)
    lines = ["", "not in the table"]
    for (backend, reason), where in cases.items():
        text = f"{reason} ({'; '.join(where) if len(where) < _CASES else 'all cases'})"
        lines += textwrap.wrap(text, 118, initial_indent=f"  {backend:<18}", subsequent_indent=" " * 20)
    return lines
