"""A LayerNorm of one kernel: its time, its registers, and the shapes it takes (A-layernorm-kernel)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import at_least, at_most, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled, read
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.performance.side_by_side import Race

_A = published("A-layernorm-kernel")
_ROWS, _SIZE = 2048, 2048
_WHY = "a factor of 2, because shape, baseline and GPU are not published"
_SIZES = (1, 7, 64, 576, 1000, 2048, 4095, 8191)


def race_norms(lab: Lab) -> Race:
    """Time LayerNorm operation by operation, PyTorch's, and ours, in the same rounds."""
    import torch
    import torch.nn.functional as F

    from vllm_teach.kernels import norms
    from vllm_teach.performance.norm_bench import layer_norm_by_operations
    from vllm_teach.performance.side_by_side import race

    source = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=source) for size in ((_ROWS, _SIZE), (_SIZE,), (_SIZE,)))
    dtype = torch.float16 if lab.on_gpu else torch.float32
    x, weight, bias = (tensor.to(lab.device, dtype) for tensor in (x, weight, bias))
    calls = {
        "one kernel": partial(norms.layer_norm, x, weight, bias),
        "by operations": partial(layer_norm_by_operations, x, weight, bias),
        "F.layer_norm": partial(F.layer_norm, x, (_SIZE,), weight, bias),
    }
    with torch.inference_mode(), lab.one_thread():
        return race(calls, "one kernel", rounds=lab.pick(31, 11), warmup=3, device=lab.device)


@experiment(
    "A-layernorm-kernel",
    "time_ms",
    *(
        near(
            f"3.0 times as fast as {what}, by the clock", f"time, {name} / one kernel", _A("time_ms", "ratio"), 2.0,
            _WHY,
        )
        for what, name in (("operation by operation", "by operations"), ("PyTorch's own kernel", "F.layer_norm"))
    ),
    near(
        "3.0 times as fast, by the bytes", "bytes in half precision, by operations / one kernel",
        _A("time_ms", "ratio"), 2.0, f"{_WHY}; half in and half out, as the article's kernel has it",
    ),
)  # fmt: skip
def time(lab: Lab) -> Iterator[Finding]:
    """Race LayerNorm operation by operation against one kernel, and count the bytes that both move."""
    from vllm_teach.performance.norm_traffic import fused_traffic, op_by_op_traffic

    found = lab.once(race_norms)
    setting = f"{_ROWS:,} x {_SIZE:,}, {'float16' if lab.on_gpu else 'float32, one thread'}, {lab.label}"
    yield measured("time, by operations / one kernel", found.ratios["by operations"], "x", setting)
    yield measured("time, F.layer_norm / one kernel", found.ratios["F.layer_norm"], "x", f"{setting}; fused as well")
    for name, input_bytes in (("half precision", 2), ("float32", 4)):
        sizes: dict[str, Any] = {"kind": "layer_norm", "rows": _ROWS, "size": _SIZE, "input_bytes": input_bytes}
        bytes_of = [traffic(**sizes).bytes_moved for traffic in (op_by_op_traffic, fused_traffic)]
        ratio = bytes_of[0] / bytes_of[1]
        yield counted(f"bytes in {name}, by operations / one kernel", ratio, "x", "statistics in float32")
    moved = _A("time_ms", "optimised") / 1e3 * a100.card().memory_bandwidth
    yield arithmetic(
        "rows of 2,048 that 0.4 ms are worth", moved / (2 * 2 * _SIZE), "rows",
        f"0.4 ms x 1,555 GB/s = {moved / 1e6:.0f} MB, half in and half out: no usual batch",
    )  # fmt: skip


@experiment(
    "A-layernorm-kernel",
    "registers_reduction",
    *(
        near(
            f"30 % fewer registers, {what}", f"registers saved, {what}", _A("registers_reduction", "value"), 1.25,
            "a factor of 1.25, as the plain kernel is not published; the counts are the compiler's own", 0.0,
        )
        for what in ("2 bytes a load", "16 bytes a load")
    ),
)  # fmt: skip
def registers(lab: Lab) -> Iterator[Finding]:
    """Read what NVIDIA's compiler allots to our plain kernel and to both fused ones, for an A100."""
    from vllm_teach.performance.multiprocessor import resident_threads
    from vllm_teach.performance.register_report import read_registers

    report = read_registers()
    plain = report.find("plain_layer_norm", "sm_80").registers
    where = f"norm_registers.json, {report.compiler} for sm_80, `{report.command}`"
    for what, wide in (("2 bytes a load", 1), ("16 bytes a load", 8)):
        fused = report.find(f"norm_kernel<__half, LayerNorm, false, {wide}>", "sm_80").registers
        yield read(f"registers saved, {what}", 1 - fused / plain, "", f"{plain} to {fused}; {where}")
        more = resident_threads(fused, 256, 64).threads / resident_threads(plain, 256, 1024).threads
        yield modelled(
            f"threads at once on an A100, {what}", more, "x", "NVIDIA's occupancy rules, 256 threads a block"
        )


@experiment(
    "A-layernorm-kernel",
    "dynamic_input_shapes",
    at_least("sizes known at run time", "sizes it takes", 1.0, "the claim is of all sizes"),
    at_most("with right results", "largest error beside float64", 1e-4, "float32's rounding in sums of up to 8,191"),
)
def dynamic_shapes(lab: Lab) -> Iterator[Finding]:
    """Run the same built kernel on rows of 1 to 8,191 elements, and compare with float64."""
    import torch
    import torch.nn.functional as F

    from vllm_teach.kernels import norms

    source = torch.Generator().manual_seed(0)
    worst, right = 0.0, 0
    for size in _SIZES:
        x = torch.randn(5, size, generator=source).to(lab.device)
        found = norms.layer_norm(x).double()
        error = float((found - F.layer_norm(x.double(), (size,))).abs().max())
        right += error < 1e-4
        worst = max(worst, error)
    path = norms.explain("layer_norm", x)
    yield counted(
        "sizes it takes", right / len(_SIZES), "of all tried", f"rows of {', '.join(map(str, _SIZES))}; {path}"
    )
    yield counted("largest error beside float64", worst, "", "the same rows, float32")
