"""A customer service before and after: requests a second, 99th percentile and memory of three systems."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_teach.validation.audit.check import Check, at_least, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.three_systems import SYSTEMS, ThreeSystems, run_three_systems
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured
from vllm_teach.validation.audit.lab import Lab

_B = published("B-customer-service")
_ROWS = {"original": "original_pytorch", "flash": "flashattention", "full": "full_vllm"}
_WHY = "a factor of 2: model, lengths, load and hardware are not published, so that a closer figure would be chance"
_QPS, _P99, _MEMORY = "requests a second", "99th percentile", "memory for all requests at once"


def _gains(row: str) -> tuple[Check, ...]:
    """The checks of a system against the original, from the published figures."""
    claims = {
        _QPS: _B(row, "qps") / _B("original_pytorch", "qps"),
        _P99: _B("original_pytorch", "p99_ms") / _B(row, "p99_ms"),
        _MEMORY: _B("original_pytorch", "gpu_memory_gb") / _B(row, "gpu_memory_gb"),
    }
    return tuple(
        near(f"{name} is better by {claimed:.1f}", f"{name}, gain over the original", claimed, 2.0, _WHY)
        for name, claimed in claims.items()
    )


def _loop(found: ThreeSystems) -> str:
    """The open loop in words."""
    load = f"{found.rate:.2g} requests/s, 80 % of the original's most"
    streams = len(found.runs["original"].p99.samples)
    return f"open loop, {load}, {streams} streams, of whose {found.num_in_loop} it is the slowest; {found.setting}"


def _gain(lab: Lab, name: str) -> Iterator[Finding]:
    found = lab.once(run_three_systems)
    yield measured(
        f"{_QPS}, gain over the original", found.ratio("original", name), "x", f"all at once; {found.setting}"
    )
    p99 = found.ratio("original", name, lambda run: run.p99)
    yield measured(f"{_P99}, gain over the original", p99, "x", _loop(found))
    yield counted(
        f"{_MEMORY}, gain over the original", found.memory("original") / found.memory(name), "x",
        f"weights, scores, and K and V: a reservation for each request, or the slots held at most; {found.setting}",
    )  # fmt: skip
    yield counted(
        "K and V alone, gain over the original", found.cache("original") / found.cache(name), "x", found.setting
    )
    fewer = found.runs["original"].steps / found.runs[name].steps
    yield counted(
        "steps, original / this", fewer, "x", f"the gain where a step takes as long for any batch; {found.setting}"
    )


def _little(row: str) -> Finding:
    in_flight = _B(row, "qps") * _B(row, "p99_ms") / 1e3
    return arithmetic(
        "requests in flight by Little's law", in_flight, "",
        f"{_B(row, 'qps'):.0f} a second x {_B(row, 'p99_ms') / 1e3:.2f} s, if P99 is near the mean; alike for all",
    )  # fmt: skip


@experiment(
    "B-customer-service",
    "original_pytorch",
    *(
        at_least(
            f"it is the worst of the three: {name}", f"{name}, gain of the others, the least", 1.02,
            "2 %, in every round: a tie is no order", 1.0,
        )
        for name in (_QPS, _P99, _MEMORY)
    ),
)  # fmt: skip
def original(lab: Lab) -> Iterator[Finding]:
    """Serve the same requests with all three systems, and see whether the original is the last in each respect."""
    found = lab.once(run_three_systems)
    others = [name for name in SYSTEMS if name != "original"]
    yield measured(
        f"{_QPS}, gain of the others, the least",
        min((found.ratio("original", name) for name in others), key=lambda timing: timing.median),
        "x",
        found.setting,
    )
    yield measured(
        f"{_P99}, gain of the others, the least",
        min((found.ratio("original", name, lambda run: run.p99) for name in others), key=lambda ratio: ratio.median),
        "x",
        _loop(found),
    )
    least = min(found.memory("original") / found.memory(name) for name in others)
    yield counted(f"{_MEMORY}, gain of the others, the least", least, "x", found.setting)
    offline = found.runs["original"].offline
    yield measured("seconds for all requests at once", offline, "s", found.setting)
    yield _little("original_pytorch")


@experiment("B-customer-service", "flashattention", *_gains("flashattention"))
def flash(lab: Lab) -> Iterator[Finding]:
    """Exchange plain for tiled attention, and nothing else: contiguous reservation and static batches stay."""
    yield from _gain(lab, "flash")
    yield _little("flashattention")


@experiment("B-customer-service", "full_vllm", *_gains("full_vllm"))
def full(lab: Lab) -> Iterator[Finding]:
    """Serve with paged memory, continuous batching and tiled attention, in the same bytes of K and V."""
    yield from _gain(lab, "full")
    yield _little("full_vllm")
