"""`vllm-teach bench kernels`: each kernel of this project beside PyTorch's operation, and both their errors.

One short table over all of them; `bench attention`, `norms` and `linear` go into each. All figures of a case come from
the same rounds (`race`). A kernel that cannot run on this device is listed with the reason.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

import torch

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.kernel_cases import KERNELS, Case, Kernel
from vllm_teach.performance.kernel_failure import why_failed
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.timing import Timing, check_calls, device_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LENGTH_UNIT = 64  # groups of quantised weights and the pattern's blocks divide it


@dataclass(frozen=True)
class KernelRow:
    """One case: our seconds, and PyTorch's over ours in the same round: above 1, ours is faster.

    `error` and `their_error` are the largest differences from float64's answer.
    """

    kernel: str
    case: str
    their_name: str
    seconds: Timing
    ratio: Timing
    error: float
    their_error: float


@dataclass(frozen=True)
class LeftOut:
    """A kernel without figures, and why, as a sentence."""

    kernel: str
    sources: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class KernelBench:
    """The whole result, and what it ran on."""

    rows: list[KernelRow]
    left_out: list[LeftOut]
    length: int
    dtype: str
    rounds: int
    device: str
    environment: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


def bench_kernels(
    *,
    length: int | None = None,
    dtype: str = "bfloat16",
    rounds: int = 7,
    device: str = "cpu",
    progress: bool = True,
    kernels: tuple[Kernel, ...] = KERNELS,
) -> KernelBench:
    """Measure all cases of the kernels of this device; `length` is 1,024 on a CPU and 4,096 on a GPU by default.

    The first call of a kernel may build or compile it, for some seconds. Raises InvalidArgumentError for a `length`
    that is no multiple of 64, an unknown dtype, `rounds` below 1 and a device that is not there.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    device = device_name(device, "clock")
    default = 1024 if device == "cpu" else 4096
    length = check_count("length", default if length is None else length, 1)
    if length % _LENGTH_UNIT:
        raise InvalidArgumentError(f"length={length} is not valid: use a multiple of {_LENGTH_UNIT}.")
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype={dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    rows: list[KernelRow] = []
    left_out: list[LeftOut] = []
    with tqdm(total=len(kernels), desc="bench kernels", disable=not progress) as bar:
        for kernel in kernels:
            bar.set_postfix_str(kernel.name)
            found = _measure_all(kernel, length, DTYPES[dtype], rounds, device)
            if isinstance(found, LeftOut):
                left_out.append(found)
            else:
                rows += found
            bar.update()
    return KernelBench(rows, left_out, length, dtype, rounds, device, asdict(describe_environment()))


def _elsewhere(kernel: Kernel, device: str) -> str | None:
    kind = device.partition(":")[0]
    return None if kernel.device == kind else f"It runs on {kernel.device}, and the device asked for is {device}."


def _measure_all(
    kernel: Kernel, length: int, dtype: torch.dtype, rounds: int, device: str
) -> list[KernelRow] | LeftOut:
    reason = kernel.why_not() or _elsewhere(kernel, device) or kernel.refuses(length, dtype, device)
    if reason is None:
        try:
            return [_measure(kernel, case, rounds, device) for case in kernel.cases(length, dtype, device)]
        except Exception as error:
            reason = why_failed(error)
            if reason is None:
                raise
    return LeftOut(kernel.name, kernel.sources, reason)


def _measure(kernel: Kernel, case: Case, rounds: int, device: str) -> KernelRow:
    with torch.set_grad_enabled(case.grad):
        exact = case.exact()
        error, their_error = ((call().double() - exact).abs().max().item() for call in (case.ours, case.theirs))
        reason = kernel.why_not()  # known since the first call, which PyTorch may have served instead
        if reason is not None:
            raise MissingDependencyError(reason)
        found = race({"ours": case.ours, "theirs": case.theirs}, "ours", rounds=rounds, device=device)
    seconds, ratio = found.seconds["ours"], found.ratios["theirs"]
    return KernelRow(kernel.name, case.name, case.their_name, seconds, ratio, error, their_error)


def format_kernels(bench: KernelBench) -> str:
    """Return the result as a table of plain text, and below it the kernels that have no figures, with the reason."""
    lines = [
        f"{bench.device}, {bench.dtype}: PyTorch's time over ours in the same round, median of {bench.rounds} (lowest "
        "to highest); above 1, ours is faster",
        "errors are the largest difference from float64's answer, ours and PyTorch's",
    ]
    kernel = ""
    for row in bench.rows:
        if row.kernel != kernel:
            kernel = row.kernel
            lines += ["", kernel]
        ratio = f"{row.ratio.median:6.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
        lines.append(
            f"  {row.case:<38}{ratio:<25}{row.their_name:<20}{row.seconds.median * 1e3:9.3f} ms"
            f"   {row.error:.1e}, {row.their_error:.1e}"
        )
    if bench.left_out:
        lines += ["", "not in the table"]
    named: dict[str, list[str]] = {}
    for one in bench.left_out:
        named.setdefault(one.reason, []).append(f"{one.kernel} ({', '.join(one.sources)})")
    for reason, names in named.items():
        lines += textwrap.wrap(f"{', '.join(names)}: {reason}", 118, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)
