"""What paging gains over reserving: the real bookkeeping over a published length mix (B-paged-memory)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_teach.validation.audit.check import between, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, counted
from vllm_teach.validation.audit.lab import Lab

_B = published("B-paged-memory")
_LOW, _HIGH = _B("memory_utilisation_gain", "low"), _B("memory_utilisation_gain", "high")
_SLOTS = 65_536
_MODEL_LIMIT = 2_048
"""The longest sequence of the models that the PagedAttention paper serves, which its baselines reserve."""


@experiment(
    "B-paged-memory",
    "memory_utilisation_gain",
    between(
        "2 to 4 times, against reserving what any request may need", "paged / reserved at 2,048", _LOW, _HIGH,
        "an exact count of one length mix of several: a factor of 1.25", 1.25,
    ),
    between(
        "2 to 4 times, against knowing each length beforehand", "paged / oracle", _LOW, _HIGH,
        "the strongest baseline there could be; the same factor", 1.25,
    ),
)  # fmt: skip
def utilisation_gain(lab: Lab) -> Iterator[Finding]:
    """Serve ShareGPT's lengths from caches of one size: paged, and reserved by the PagedAttention paper's rules."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.kvcache.occupancy import PagedMemory, ReservedMemory, simulate_occupancy

    lengths = SHAREGPT.draw(lab.pick(1000, 400))
    setting = f"{len(lengths):,} requests of ShareGPT's mean lengths, {_SLOTS:,} slots"
    paged = simulate_occupancy(lengths, PagedMemory(_SLOTS))
    yield counted("utilisation, paged", paged.mean_utilization, "", f"{setting}, blocks of 16")
    rules = {"reserved at 2,048": ("max", _MODEL_LIMIT), "oracle": ("oracle", _MODEL_LIMIT), "8,192": ("max", 8192)}
    for name, (rule, limit) in rules.items():
        run = simulate_occupancy(lengths, ReservedMemory(_SLOTS, rule, limit))
        yield counted(f"paged / {name}", paged.mean_utilization / run.mean_utilization, "x", setting)
        yield counted(f"sequences in flight, paged / {name}", paged.mean_in_flight / run.mean_in_flight, "x", setting)
