"""Advice on memory: block size, swap space, what to do when it runs out, max_model_len (A-tuning-advice)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import at_least, at_most, near
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.attention_speed import tiled_backend
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.kvcache.occupancy import Occupancy
    from vllm_teach.performance.simulator.serving import ServingReport

_TABLE = "A-tuning-advice"
_SLOTS = 65_536
_SIZES = (4, 16, 91, 256)
"""Block sizes in tokens; 91 tokens of SmolLM2 in bfloat16 are 4 MiB over all layers."""
_FOUR_MIB = 4 * 2**20
_PAYS = "5 %: less than that is not worth a setting"
_EXACT = "an exact count, so no tolerance; a tie is no change"


def occupancy_by_block_size(lab: Lab) -> dict[int, Occupancy]:
    """Serve ShareGPT's lengths from one cache, cut into blocks of each size; exact."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.kvcache.occupancy import PagedMemory, simulate_occupancy

    lengths = SHAREGPT.draw(lab.pick(600, 200))
    slots = lab.pick(_SLOTS, _SLOTS // 2)
    return {size: simulate_occupancy(lengths, PagedMemory(slots, size)) for size in _SIZES}


def simulate_pool(count: int, num_blocks: int, **settings: Any) -> ServingReport:
    """Simulate Llama-2-7B on an A100 with so many blocks, ShareGPT's lengths, all requests at once."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import draw_traffic

    common: dict[str, Any] = {"dtype": "float16", "enable_prefix_caching": False, "num_kv_blocks": num_blocks}
    return simulate_serving("llama-2-7b", a100.CARDS[1], workload=draw_traffic(count, SHAREGPT), **common, **settings)


_MODEL_7B = "Llama-2-7B on an A100 80GB by its data sheet, ShareGPT's lengths, our own scheduler"
_MODEL_7B_40 = _MODEL_7B.replace("80GB", "40GB")


@experiment(
    _TABLE,
    "block_size_should_be_a_multiple_of_4_mb_to_match",
    at_least(
        "a block has such a size",
        "published shapes whose block of 16 tokens is a multiple of 4 MiB",
        1.0,
        "vLLM's default of 16 tokens serves all of them, so a rule must hold for all",
    ),
    at_least("it reads faster", "time of a read, blocks of 16 tokens / of 4 MiB", 1.05, _PAYS, 1.0),
    at_least("it wastes no memory", "sequences in flight, blocks of 4 MiB / of 16 tokens", 0.95, _PAYS),
)
def four_megabytes(lab: Lab) -> Iterator[Finding]:
    """Compute the bytes of a block of 16 tokens, time reads of small and of 4 MiB blocks, and count what fits."""
    from vllm_teach.performance.model_shapes import SHAPES

    blocks = {name: 16 * shape.config.kv_bytes_per_token(2) for name, shape in SHAPES.items()}
    fitting = sum(size % _FOUR_MIB == 0 for size in blocks.values()) / len(blocks)
    yield arithmetic(
        "published shapes whose block of 16 tokens is a multiple of 4 MiB", fitting, "of them",
        ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in blocks.items()),
    )  # fmt: skip
    yield _read_time(lab)
    runs = lab.once(occupancy_by_block_size)
    yield counted(
        "sequences in flight, blocks of 4 MiB / of 16 tokens", runs[91].mean_in_flight / runs[16].mean_in_flight, "x",
        "SmolLM2 in bfloat16, where 4 MiB are 91 tokens; ShareGPT's lengths",
    )  # fmt: skip


def _read_time(lab: Lab) -> Finding:
    """Time one decode step's attention in a layer over scattered blocks of 16 tokens and of 4 MiB."""
    from functools import partial

    from vllm_teach import backends
    from vllm_teach.performance.paged_read import decode_call
    from vllm_teach.performance.side_by_side import race

    large = _FOUR_MIB // (3 * 64 * 4)  # K of one token in one layer of SmolLM2, float32
    backend = tiled_backend("cpu")
    calls = {}
    for size in (16, large):
        q, k, v, layout = decode_call(8192, size, 2, "scattered")
        calls[str(size)] = partial(backends.attend, q, k, v, backend=backend, layout=layout, causal=True)
    found = race(calls, str(large), rounds=lab.pick(31, 15), warmup=2)
    setting = f"8,192 keys, blocks of 16 or {large:,} tokens anywhere, backend {backend!r}, on the processor"
    return measured("time of a read, blocks of 16 tokens / of 4 MiB", found.ratios["16"], "x", setting)


@experiment(
    _TABLE,
    "a_larger_block_size_raises_memory_utilisation",
    at_least("memory utilisation rises", "utilisation, blocks of 256 / of 16", 1.0, _EXACT, 1.0),
    at_most("parallelism falls", "sequences in flight, blocks of 256 / of 16", 1.0, _EXACT, 1.0),
)
def larger_blocks(lab: Lab) -> Iterator[Finding]:
    """Count tokens stored in slots held, and sequences in flight, for blocks of 4 to 256 tokens."""
    runs = lab.once(occupancy_by_block_size)
    for size, run in runs.items():
        yield counted(f"utilisation, blocks of {size}", run.mean_utilization, "", "ShareGPT's lengths")
    a, b = runs[256], runs[16]
    yield counted("utilisation, blocks of 256 / of 16", a.mean_utilization / b.mean_utilization, "x", "the same")
    in_flight = a.mean_in_flight / b.mean_in_flight
    yield counted("sequences in flight, blocks of 256 / of 16", in_flight, "x", "the same")


_CROWDS = (64, 256, 512)
"""Requests at once, all admitted as soon as they fit. On an A100 40GB 64 fit to their ends, and 512 do not by far."""


@experiment(
    _TABLE,
    "swap_space_about_1_4_of_gpu_memory",
    *(
        near(
            f"a quarter is what {crowd} requests need", f"on the host, {crowd} requests at once", 0.25, 1.5,
            "a factor of 1.5 around a quarter of the GPU's memory: what is hardly used need not be set aside", 0.0,
        )
        for crowd in _CROWDS
    ),
)  # fmt: skip
def swap_space(lab: Lab) -> Iterator[Finding]:
    """Simulate crowds of three sizes with preemption by swapping, and count the bytes on the host at the peak."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import draw_traffic

    hardware = a100.card()
    for crowd in _CROWDS:
        report = simulate_serving(
            "llama-2-7b", a100.CARDS[0], workload=draw_traffic(crowd, SHAREGPT), dtype="float16",
            enable_prefix_caching=False, preemption_mode="swap", swap_space=40, max_events=1, max_num_seqs=crowd,
        )  # fmt: skip
        memory = report.deployment.memory
        share = report.run.peak_host_blocks * memory.block_bytes / hardware.memory_bytes
        yield modelled(
            f"on the host, {crowd} requests at once", share, "of the GPU's memory",
            f"{report.run.peak_host_blocks} blocks beside {report.deployment.num_blocks} on the device; {_MODEL_7B_40}",
        )  # fmt: skip


@experiment(
    _TABLE,
    "on_oom_smaller_block_size_smaller_max_num_seqs",
    at_least(
        "a smaller block size lets more sequences in", "sequences in flight, blocks of 4 / of 16", 1.05, _PAYS, 1.0
    ),
    at_most(
        "a smaller max_num_seqs avoids preemptions", "preemptions, max_num_seqs 8 / 64", 0.5,
        "half as many: fewer would hardly be felt", 1.0,
    ),
    at_most(
        "beam search takes less memory", "blocks held, 4 beams / greedy", 1.0, _EXACT, 1.0
    ),
)  # fmt: skip
def out_of_memory(lab: Lab) -> Iterator[Finding]:
    """Count what each remedy does: smaller blocks, fewer sequences, and four beams in place of one sequence."""
    runs = lab.once(occupancy_by_block_size)
    more = runs[4].mean_in_flight / runs[16].mean_in_flight
    yield counted("sequences in flight, blocks of 4 / of 16", more, "x", "ShareGPT's lengths, full memory")
    lost = {cap: simulate_pool(60, 600, max_num_seqs=cap).run.num_preemptions for cap in (8, 64)}
    yield modelled(
        "preemptions, max_num_seqs 8 / 64", lost[8] / max(1, lost[64]), "x",
        f"{lost[8]} and {lost[64]}; 600 blocks, 60 requests at once; {_MODEL_7B}",
    )  # fmt: skip
    yield counted("blocks held, 4 beams / greedy", _beams_over_greedy(), "x", "the tiny model, 48 tokens in, 80 out")


def _beams_over_greedy() -> float:
    """Return the most blocks that a beam search of width 4 holds, over those of one sequence of the same length."""
    from vllm_teach import LLM
    from vllm_teach.engine.beam_params import BeamSearchParams
    from vllm_teach.performance.sharing import follow_beams

    llm = LLM("tiny", device="cpu", num_kv_blocks=128, enable_prefix_caching=False)
    prompt, new = list(range(5, 53)), 80
    params = BeamSearchParams(4, max_tokens=new, ignore_eos=True)
    beams = follow_beams(llm.engine, [{"prompt_token_ids": prompt}], params)
    return beams.peak / -(-(len(prompt) + new - 1) // llm.engine.kv.block_size)


@experiment(
    _TABLE,
    "for_documents_beyond_8k_tokens_max_model_len",
    at_least(
        "where memory is reserved, 1.2 x holds more documents than 32,768",
        "documents in flight, reserved, 1.2 x / 32,768", 1.05, _PAYS, 1.0,
    ),
    at_least(
        "where memory is paged, too", "documents in flight, paged, 1.2 x / 32,768", 1.05, _PAYS, 1.0,
    ),
)  # fmt: skip
def max_model_len(lab: Lab) -> Iterator[Finding]:
    """Serve documents of some 9,000 tokens with limits of 1, 1.2 and 2.3 times the longest, reserved and paged."""
    from vllm_teach.kvcache.length_mix import LengthMix
    from vllm_teach.kvcache.occupancy import ReservedMemory, simulate_occupancy

    mix = LengthMix("documents", 9000, 300, 0.25, 0.5, max_prompt=15_000, max_total=16_384)
    lengths = mix.draw(60)
    longest, slots = max(map(sum, lengths)), 262_144
    limits = {"1 x": longest, "1.2 x": int(1.2 * longest), "32,768": 32_768}
    setting = f"60 documents of up to {longest:,} tokens, {slots:,} slots"
    reserved = {
        name: simulate_occupancy(lengths, ReservedMemory(slots, "max", limit)).mean_in_flight
        for name, limit in limits.items()
    }
    for name, count in reserved.items():
        yield counted(f"documents in flight, reserved at {name}", count, "", setting)
    ratio = reserved["1.2 x"] / reserved["32,768"]
    yield counted("documents in flight, reserved, 1.2 x / 32,768", ratio, "x", setting)
    paged = {name: _in_flight(lengths, slots // 16, limits[name]) for name in ("1.2 x", "32,768")}
    for name, number in paged.items():
        yield modelled(
            f"documents in flight, paged, limit {name}", number, "", f"{setting}; Mistral-7B on an A100 80GB"
        )
    yield modelled(
        "documents in flight, paged, 1.2 x / 32,768", paged["1.2 x"] / paged["32,768"], "x",
        "the real scheduler and cache, whose blocks follow what a sequence has, not what it may have",
    )  # fmt: skip


def _in_flight(lengths: Sequence[tuple[int, int]], num_blocks: int, limit: int) -> float:
    """Return how many documents run at a time, on average, in a simulated service with that max_model_len."""
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import Traffic
    from vllm_teach.performance.virtual_time import Arrival

    workload = Traffic(tuple(Arrival(*each) for each in lengths), "documents", "all at once")
    report = simulate_serving(
        "mistral-7b", a100.CARDS[1], workload=workload, num_kv_blocks=num_blocks, max_model_len=limit,
        max_num_batched_tokens=8192, enable_prefix_caching=False, max_events=1,
    )  # fmt: skip
    return report.series.mean("running")
