"""Half precision, AWQ and GPTQ: what is lost and gained, from a committed result and by the clock (A-quantization)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import Check, at_most, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import MEASURED, READ, Finding, arithmetic
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.tables import get_table

if TYPE_CHECKING:
    from vllm_teach.performance.linear_bench import LinearBench
    from vllm_teach.performance.quantization_bench import QuantizationBench

_A = published("A-quantization")
_LOSS, _SPEED = "loss, from nats a token to perplexity", "decoding, float32 / this"
_WHY_SPEED = (
    "a factor of 1.25, the spread of the clock; the baseline is taken for float32, as its own fp16 row suggests"
)
_WHY_LOSS = "the measure is not published: between nats a token, which grows least, and perplexity, which grows most"


def _range(method: str) -> tuple[float, float]:
    bounds = get_table("A-quantization").row(method).values["accuracy_loss_percent"]
    return float(bounds["low"]), float(bounds["high"])


def _loss(method: str) -> Check:
    low, high = _range(method)
    return Check(f"{low:.0f} to {high:.0f} % of accuracy lost", _LOSS, low, high, _WHY_LOSS, 0.0, by_spread=True)


def _speed(method: str) -> Check:
    claimed = _A(method, "speedup")
    return near(f"{claimed} times as fast", _SPEED, claimed, 1.25, _WHY_SPEED)


def read_result(lab: Lab) -> QuantizationBench:
    """Read the committed result of `vllm-teach bench quantization`."""
    from vllm_teach.performance.quantization_result import read_quantization

    return read_quantization()


def time_linear_layers(lab: Lab) -> LinearBench:
    """Time the stack of SmolLM2's linear layers for one token, in bfloat16 and in 4 and 8 bits."""
    from vllm_teach.performance.linear_bench import bench_linear

    return bench_linear(rounds=lab.pick(9, 5), tokens=(1,), progress=False)


def _from_file(lab: Lab, variant: str) -> Iterator[Finding]:
    """The loss by two measures and the speed of one variant, both against float32."""
    from vllm_teach.performance.quantization_result import provenance

    bench = lab.once(read_result)
    row, base = bench.row(variant), bench.row("fp32")
    where = provenance(bench).replace("\n", "; ")
    perplexity = row.perplexity / base.perplexity - 1
    nats = math.log(row.perplexity) / math.log(base.perplexity) - 1
    ends = sorted((100 * nats, 100 * perplexity))
    yield Finding(_LOSS, 100 * perplexity, "%", READ, where, ends[0], ends[1], 2)
    faster = [slow / fast for slow, fast in zip(base.decode.samples, row.decode.samples, strict=True)]
    timing = Timing.of(faster)
    yield Finding(_SPEED, timing.median, "x", READ, where, timing.low, timing.high, len(faster))


def _here(lab: Lab) -> Iterator[Finding]:
    bench = lab.once(time_linear_layers)
    for row in bench.rows:
        if row.method == "int4" and row.case.endswith("layers"):
            setting = f"SmolLM2's {row.case}' matrices, one token, on the processor"
            low, high = sorted((1 / row.ratio_low, 1 / row.ratio_high))
            yield Finding(
                "linear layers here, bfloat16 / 4 bits", 1 / row.ratio, "x", MEASURED, setting, low, high, bench.rounds
            )


@experiment(
    "A-quantization",
    "fp16",
    at_most(
        "less than 1 % of accuracy lost", _LOSS,
        get_table("A-quantization").row("fp16").values["accuracy_loss_percent"]["below"],
        "the claim's own bound; by either measure",
    ),
    _speed("fp16"),
)  # fmt: skip
def half_precision(lab: Lab) -> Iterator[Finding]:
    """Read perplexity and decoding speed of SmolLM2 in 16 bits (bfloat16 on a processor) against float32."""
    yield from _from_file(lab, "bf16")
    yield arithmetic("bytes, float32 / float16", 2, "x", "the most that 16 bits can gain where memory is the limit")


@experiment("A-quantization", "awq", _loss("awq"), _speed("awq"))
def awq(lab: Lab) -> Iterator[Finding]:
    """Read perplexity and decoding speed of SmolLM2 by AWQ in 4 bits; time the matrices in 4 bits here."""
    yield from _from_file(lab, "awq4")
    yield from _here(lab)
    four_bits = 4 + 16 / 128 + 4 / 128  # a scale and a zero point for each group of 128
    yield arithmetic(
        "bytes, float32 / 4 bits", 32 / four_bits, "x",
        f"groups of 128: {a100.PARAMETERS_70B * four_bits / 8e9:.0f} GB of Llama-2-70B instead of 276",
    )  # fmt: skip


@experiment(
    "A-quantization",
    "gptq",
    _loss("gptq"),
    _speed("gptq"),
    near(
        "it is 1.25 times as fast as AWQ", "decoding, AWQ / GPTQ", _A("gptq", "speedup") / _A("awq", "speedup"), 1.1,
        "a factor of 1.1: both read the same bytes, so that a difference must show beside the clock's spread",
    ),
)  # fmt: skip
def gptq(lab: Lab) -> Iterator[Finding]:
    """Read perplexity and decoding speed of SmolLM2 by GPTQ in 4 bits, and compare it with AWQ's."""
    from vllm_teach.performance.quantization_result import provenance

    yield from _from_file(lab, "gptq4")
    bench = lab.once(read_result)
    pairs = zip(bench.row("awq4").decode.samples, bench.row("gptq4").decode.samples, strict=True)
    timing = Timing.of([awq_seconds / gptq_seconds for awq_seconds, gptq_seconds in pairs])
    where = provenance(bench).replace("\n", "; ")
    yield Finding("decoding, AWQ / GPTQ", timing.median, "x", READ, where, timing.low, timing.high, bench.rounds)
    yield from _here(lab)
