"""Llama-2-70B on eight A100s, and "5 to 10 times" for a GPT-3: ratios measured here, figures modelled there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import at_least, at_most, between, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.three_systems import RESERVED, run_three_systems
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.performance.simulator.serving import ServingReport

_A = published("A-llama2-70b-serving")
_OVERALL = published("A-overall")
_WHY = "a factor of 2: neither the baseline's batch nor the lengths of the requests in flight are published"
_BATCH = f"the baseline has batches of {RESERVED}, the most that article B says fit (B-bottleneck)"
_MOST = 256  # sequences in a step of the full system, and of the strongest baseline: 355 reservations would fit
_HOW = "8 x A100 80GB by their data sheets, assumed efficiencies, our own scheduler"


def simulate_70b(lab: Lab) -> dict[str, ServingReport]:
    """Simulate the article's run on its hardware: the original with batches of 1, of 4 and of 256, and everything."""
    runs = {
        f"original, batch {batch}": _simulate(min(8 * batch, 512), _reserving(batch)) for batch in (1, RESERVED, _MOST)
    }
    return runs | {"full": _simulate(1000, {"max_num_seqs": _MOST})}


def _reserving(batch: int, attention: str = "naive", longest: int = 4096) -> dict[str, Any]:
    """Return the settings of a system that reserves the longest sequence for each and batches statically."""
    return {"attention": attention, "batching": "static", "block_size": longest, "max_num_seqs": batch}


def _simulate(count: int, settings: dict[str, Any]) -> ServingReport:
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import draw_traffic

    workload = draw_traffic(count, (2048, 512))
    common: dict[str, Any] = {
        "tensor_parallel_size": 8, "dtype": "float16", "enable_prefix_caching": False, "max_events": 1,
    }  # fmt: skip
    return simulate_serving("llama-2-70b", a100.CARDS[1], workload=workload, **common, **settings)


@experiment(
    "A-llama2-70b-serving",
    "throughput_tokens_per_s",
    near(
        "9.2 times the throughput, on its hardware", f"full / original, batch {RESERVED}, modelled",
        _A("throughput_tokens_per_s", "ratio"), 2.0, f"{_WHY}; {_BATCH}",
    ),
    near(
        f"9.2 times, where the baseline has batches of {_MOST}", f"full / original, batch {_MOST}, modelled",
        _A("throughput_tokens_per_s", "ratio"), 2.0, f"{_WHY}; as many as the full system, and they fit",
    ),
    near(
        "9.2 times, on this machine", "full / original, measured", _A("throughput_tokens_per_s", "ratio"), 2.0, _WHY,
    ),
    near(
        "387 tokens/s on 8 x A100", "full, modelled", _A("throughput_tokens_per_s", "optimised"), 2.0,
        "a factor of 2 for assumed efficiencies, which no A100 has confirmed here", None,
    ),
)  # fmt: skip
def throughput(lab: Lab) -> Iterator[Finding]:
    """Simulate the run of 1,000 requests on eight A100s, and run original and full system on a real model here."""
    runs = lab.once(simulate_70b)
    full = runs["full"].output_throughput
    yield modelled("full, modelled", full, "tokens/s", f"{len(runs['full'].workload.arrivals):,} requests; {_HOW}")
    for name, run in runs.items():
        if name != "full":
            yield modelled(f"{name}, modelled", run.output_throughput, "tokens/s", _HOW)
            yield modelled(f"full / {name}, modelled", full / run.output_throughput, "x", _HOW)
    found = lab.once(run_three_systems)
    yield measured("full / original, measured", found.ratio("original", "full"), "x", f"all at once; {found.setting}")


@experiment(
    "A-llama2-70b-serving",
    "latency_ms_per_token",
    at_most(
        "2.6 ms from token to token", "least time of a token, 8 x A100", _A("latency_ms_per_token", "optimised"),
        "a bound: every token reads all weights once, so that the claim cannot be below it",
    ),
    near(
        "9.1 times sooner, on its hardware", "time between tokens, original / full, modelled",
        _A("latency_ms_per_token", "ratio"), 2.0, f"{_WHY}; {_BATCH}",
    ),
    near(
        "9.1 times sooner, on this machine", "time between tokens, original / full, measured",
        _A("latency_ms_per_token", "ratio"), 2.0, _WHY,
    ),
    at_least(
        "it is a second measurement beside the throughput", "distance from 1000 / throughput", 0.02,
        "2 %: two figures that agree to their last published digit are one",
    ),
)  # fmt: skip
def latency(lab: Lab) -> Iterator[Finding]:
    """Compare the row with 1000 / throughput and with the time that reading the weights takes; measure token gaps."""
    for which in ("baseline", "optimised"):
        inverse = 1000 / _A("throughput_tokens_per_s", which)
        yield arithmetic(
            f"1000 / throughput, {which}", inverse, "ms",
            f"1000 / {_A('throughput_tokens_per_s', which):.0f}; published: {_A('latency_ms_per_token', which)}",
        )  # fmt: skip
    apart = max(
        abs(1000 / _A("throughput_tokens_per_s", which) / _A("latency_ms_per_token", which) - 1)
        for which in ("baseline", "optimised")
    )
    yield arithmetic("distance from 1000 / throughput", apart, "", "the larger of the two, as a share")
    bandwidth = 8 * a100.card(a100.CARDS[1]).memory_bandwidth
    least = 2 * a100.PARAMETERS_70B / bandwidth * 1e3
    yield modelled("least time of a token, 8 x A100", least, "ms", "138 GB of float16 weights at 8 x 2,039 GB/s")
    gaps = {name: (run.latencies["itl"] or {})["p50"] * 1e3 for name, run in lab.once(simulate_70b).items()}
    for name, gap in gaps.items():
        yield modelled(f"time between tokens, {name}", gap, "ms", f"median; {_HOW}")
    ratio = gaps[f"original, batch {RESERVED}"] / gaps["full"]
    yield modelled("time between tokens, original / full, modelled", ratio, "x", f"batches of {RESERVED}; {_HOW}")
    found = lab.once(run_three_systems)
    here = found.ratio("original", "full", lambda run: run.gaps)
    yield measured("time between tokens, original / full, measured", here, "x", f"medians; {found.setting}")


@experiment(
    "A-llama2-70b-serving",
    "gpu_memory_gb",
    *(
        at_most(
            f"{_A('gpu_memory_gb', which):.0f} GB {what}", "weights in float16", _A("gpu_memory_gb", which),
            "a bound: the memory in use cannot be less than the weights",
        )
        for which, what in (("baseline", "before"), ("optimised", "after"))
    ),
    at_least(
        "half of the memory saved, on this machine", "memory saved, measured", _A("gpu_memory_gb", "reduction"),
        "the claim's own figure: weights, K and V and scores for the same requests", neutral=0.0,
    ),
)  # fmt: skip
def memory(lab: Lab) -> Iterator[Finding]:
    """Compare the figures with the weights alone; count what original and full system hold on a real model."""
    weights = 2 * a100.PARAMETERS_70B / 1e9
    yield arithmetic("weights in float16", weights, "GB", f"{a100.PARAMETERS_70B:,} parameters, two bytes each")
    yield arithmetic("weights in 4 bits", weights / 4, "GB", "which no row of the table mentions")
    found = lab.once(run_three_systems)
    saved = 1 - found.memory("full") / found.memory("original")
    yield counted("memory saved, measured", saved, "of all", found.setting)
    yield counted("K and V saved", 1 - found.cache("full") / found.cache("original"), "of K and V", found.setting)


def simulate_gpt3(lab: Lab) -> dict[str, ServingReport]:
    """Simulate a GPT-3 on eight A100s serving ShareGPT's lengths: original with all that fits, with 4, and full."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import draw_traffic

    workload = draw_traffic(400, SHAREGPT)  # with fewer, the full system would run half empty
    common: dict[str, Any] = {
        "tensor_parallel_size": 8, "dtype": "float16", "enable_prefix_caching": False, "max_events": 1,
        "workload": workload,
    }  # fmt: skip
    settings = {
        "original": _reserving(256, longest=2048),
        f"original, batch {RESERVED}": _reserving(RESERVED, longest=2048),
        "full": {},
    }
    return {
        name: simulate_serving("gpt-3-175b-like", a100.CARDS[1], **common, **each) for name, each in settings.items()
    }


@experiment(
    "A-overall",
    "speedup_gpt3_class",
    between(
        "5 to 10 times for a GPT-3, where the original batches all that fits", "full / original, modelled",
        _OVERALL("speedup_gpt3_class", "low"), _OVERALL("speedup_gpt3_class", "high"),
        "a factor of 1.25 beyond the published range", 1.25,
    ),
    between(
        f"5 to 10 times, where it has batches of {RESERVED}", f"full / original, batch {RESERVED}, modelled",
        _OVERALL("speedup_gpt3_class", "low"), _OVERALL("speedup_gpt3_class", "high"),
        "a factor of 1.25 beyond the published range", 1.25,
    ),
    between(
        "5 to 10 times, on this machine", "full / original, measured",
        _OVERALL("speedup_gpt3_class", "low"), _OVERALL("speedup_gpt3_class", "high"),
        "a factor of 1.25 beyond the published range", 1.25,
    ),
)  # fmt: skip
def speedup(lab: Lab) -> Iterator[Finding]:
    """Simulate 175 billion parameters on eight A100s, original and full, and run both systems on a real model here."""
    runs = lab.once(simulate_gpt3)
    full = runs["full"].output_throughput
    how = f"{runs['full'].workload}; {_HOW}"
    for name in ("original", f"original, batch {RESERVED}"):
        yield modelled(f"full / {name}, modelled", full / runs[name].output_throughput, "x", how)
    found = lab.once(run_three_systems)
    yield measured("full / original, measured", found.ratio("original", "full"), "x", f"all at once; {found.setting}")


@experiment(
    "A-overall",
    "memory_reduction",
    at_least(
        "half of the memory of K and V", "K and V saved", _OVERALL("memory_reduction", "at_least"),
        "an exact count, so no tolerance", neutral=0.0,
    ),
    at_least(
        "half of all memory, weights included", "all memory saved, GPT-3", _OVERALL("memory_reduction", "at_least"),
        "an exact count, so no tolerance", neutral=0.0,
    ),
)  # fmt: skip
def overall_memory(lab: Lab) -> Iterator[Finding]:
    """Serve ShareGPT's lengths from a paged and a reserved cache, and add a GPT-3's weights to both."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.kvcache.occupancy import PagedMemory, ReservedMemory, simulate_occupancy

    lengths = SHAREGPT.draw(lab.pick(1000, 300))
    slots = 27 * 2048
    paged = simulate_occupancy(lengths, PagedMemory(slots))
    reserved = simulate_occupancy(lengths, ReservedMemory(slots, "max", 2048))
    each = [slots * run.mean_utilization / run.mean_in_flight for run in (paged, reserved)]  # tokens stored, a sequence
    held = [tokens / run.mean_utilization for tokens, run in zip(each, (paged, reserved), strict=True)]
    setting = f"{len(lengths):,} requests of ShareGPT's lengths; reserved: 2,048 slots each"
    yield counted("K and V saved", 1 - held[0] / held[1], "of K and V", setting)
    weights, token = 2 * 175e9, 2 * 96 * 96 * 128 * 2
    before, after = (weights + 27 * slots_each * token for slots_each in (held[1], held[0]))
    yield arithmetic(
        "all memory saved, GPT-3", 1 - after / before, "of all",
        f"350 GB of weights and 27 sequences, as many as eight A100s hold reserved: {before / 1e9:.0f} GB before",
    )  # fmt: skip
