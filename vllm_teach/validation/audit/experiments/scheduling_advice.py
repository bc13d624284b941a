"""Advice on scheduling and serving: max_num_seqs, what slows a server down, workers, balancing, a timeout."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.kvcache.length_mix import LengthMix
    from vllm_teach.performance.fleet import FleetRun
    from vllm_teach.performance.simulator.serving import ServingReport
    from vllm_teach.performance.virtual_time import Arrival

_TABLE = "A-tuning-advice"
_PAYS = "5 %: less than that is not worth a setting"
_MODEL = "Llama-2-7B on an A100 80GB by its data sheet, our own scheduler"


def _simulate_7b(count: int, rate: float, **settings: Any) -> ServingReport:
    """Simulate ShareGPT's lengths at a Poisson rate, requests a second."""
    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.performance.simulator.serving import simulate_serving
    from vllm_teach.performance.simulator.traffic import draw_traffic

    common: dict[str, Any] = {"dtype": "float16", "enable_prefix_caching": False, "max_events": 1}
    workload = draw_traffic(count, SHAREGPT, rate)
    return simulate_serving("llama-2-7b", a100.CARDS[1], workload=workload, **common, **settings)


@experiment(
    _TABLE,
    "max_num_seqs_about_twice_the_batch_size",
    at_most(
        "twice the batch is enough", "p99 latency, cap of 2 batches / no cap", 1.05, _PAYS
    ),
    at_least(
        "the batch alone is not", "p99 latency, cap of 1 batch / no cap", 1.05, _PAYS, 1.0
    ),
    at_least(
        "without memory to spare, too", "throughput, short of memory, 2 batches / 1 batch", 1.05, _PAYS, 1.0
    ),
)  # fmt: skip
def max_num_seqs(lab: Lab) -> Iterator[Finding]:
    """Simulate a Poisson stream without a cap, take its mean batch, and cap it at once and twice that."""
    count, rate = lab.pick(600, 200), 6.0
    free = _simulate_7b(count, rate, max_num_seqs=1024)
    batch = max(1, round(free.series.mean("running")))
    yield modelled("mean batch without a cap", batch, "sequences", f"{free.workload}; {_MODEL}")
    for times, name in ((1, "1 batch"), (2, "2 batches")):
        capped = _simulate_7b(count, rate, max_num_seqs=times * batch)
        ratio = capped.run.latency(0.99) / free.run.latency(0.99)
        yield modelled(f"p99 latency, cap of {name} / no cap", ratio, "x", f"the same; max_num_seqs={times * batch}")
    blocks = batch * 30  # about the tokens that so many sequences have
    short = [
        _simulate_7b(count // 2, float("inf"), max_num_seqs=times * batch, num_kv_blocks=blocks).output_throughput
        for times in (1, 2)
    ]
    yield modelled(
        "throughput, short of memory, 2 batches / 1 batch", short[1] / short[0], "x",
        f"{blocks} blocks, all at once; here blocks are the cap; {_MODEL}",
    )  # fmt: skip


def measure_busy_shares(lab: Lab) -> dict[int, tuple[Timing, Timing]]:
    """Measure, by sequences in a step, the share of a step in which the device computes, and tokens a second."""
    from vllm_teach import LLM, data
    from vllm_teach.performance.step_profile import measure_step_parts
    from vllm_teach.performance.workload import draw_workload
    from vllm_teach.validation.audit.lab import MODEL

    llm = LLM(MODEL, device=lab.device, num_kv_blocks=128, enable_prefix_caching=False)
    ids = lab.tokenizer.encode(data.path("texts/corran_sound.txt").read_text(encoding="utf-8"))
    found = {}
    for sequences in (1, 16):
        workload = draw_workload(ids, sequences, inputs=(16, 32), outputs=(1, 1))
        parts = [measure_step_parts(llm, workload, lab.pick(10, 3)) for _ in range(5)]
        busy = Timing.of([1 - each.bookkeeping_share for each in parts])
        found[sequences] = busy, Timing.of([sequences / each.step for each in parts])
    return found


@experiment(
    _TABLE,
    "a_drop_in_throughput_comes_from_gpu_utilisation",
    at_most(
        "utilisation tells the throughput", "tokens/s at the same utilisation, 16 sequences / 1", 1.5,
        "if utilisation decided, equal utilisation would mean about equal throughput: a factor of 1.5",
    ),
    at_least(
        "swapping costs throughput", "throughput, no swapping / swapping, same work", 1.05, _PAYS, 1.0
    ),
    at_least(
        "a slow network costs throughput", "step, 100 Gb/s network / NVLink", 1.05, _PAYS, 1.0
    ),
)  # fmt: skip
def throughput_drop(lab: Lab) -> Iterator[Finding]:
    """Take each named cause by itself; for utilisation, compare two batches in which the device is as busy."""
    yield _swapping(lab)
    yield _network()
    shares = lab.once(measure_busy_shares)
    for sequences, (busy, _) in shares.items():
        yield measured(f"device at work, {sequences} sequences", busy, "of a step", f"SmolLM2, decode, {lab.label}")
    pairs = zip(shares[16][1].samples, shares[1][1].samples, strict=True)
    rates = Timing.of([many / one for many, one in pairs])
    yield measured("tokens/s at the same utilisation, 16 sequences / 1", rates, "x", f"SmolLM2, decode, {lab.label}")


def _swapping(lab: Lab) -> Finding:
    """Serve the same requests in a small pool that swaps, and as if moving blocks cost nothing."""
    from dataclasses import replace

    from vllm_teach.kvcache.length_mix import SHAREGPT
    from vllm_teach.performance.hardware import get_hardware
    from vllm_teach.performance.simulator.deployment import deploy
    from vllm_teach.performance.simulator.traffic import draw_traffic

    hardware = get_hardware(a100.CARDS[1])
    free = replace(hardware, host_link=replace(hardware.host_link, bandwidth=1e18, latency=0.0))
    traffic = draw_traffic(lab.pick(120, 60), SHAREGPT)
    settings: dict[str, Any] = {
        "dtype": "float16", "num_kv_blocks": 400, "preemption_mode": "swap", "swap_space": 40,
        "enable_prefix_caching": False,
    }  # fmt: skip
    rates = [deploy("llama-2-7b", each, **settings).simulate(traffic, max_events=1) for each in (free, hardware)]
    return modelled(
        "throughput, no swapping / swapping, same work", rates[0].throughput / rates[1].throughput, "x",
        f"400 blocks, {rates[1].kv.usage().swapped_out} blocks swapped over PCIe 4; {_MODEL}",
    )  # fmt: skip


def _network() -> Finding:
    """Compare a prefill step of Llama-2-70B on eight devices over two links."""
    from vllm_teach.performance.cost_model.links import get_link
    from vllm_teach.performance.cost_model.step_cost import ModelledStep
    from vllm_teach.performance.cost_model.step_shape import StepShape
    from vllm_teach.performance.model_shapes import get_model_shape

    prefill = StepShape(1, 2048, 1, chunks=((0, 2048),))
    seconds = [
        sum(
            ModelledStep(
                get_model_shape("llama-2-70b"), a100.card(a100.CARDS[1]), dtype="float16", tensor_parallel_size=8,
                link=get_link(link),
            ).parts_of(prefill, 16).values()
        )
        for link in ("rdma-100g", "nvlink3")
    ]  # fmt: skip
    return modelled(
        "step, 100 Gb/s network / NVLink", seconds[0] / seconds[1], "x", "Llama-2-70B on 8 x A100, a prompt of 2,048"
    )


@experiment(
    _TABLE,
    "2_4_workers_per_gpu_instance_nginx_least_conn_a",
    at_least(
        "two to four workers a GPU serve more", "throughput, the best of 2 to 4 workers / 1", 1.05, _PAYS, 1.0
    ),
    at_least(
        "least_conn beats taking turns", "p99 of the first token, round robin / least_conn", 1.05, _PAYS, 1.0
    ),
    at_least(
        "a limit of 5 s lets more be answered in time", "answered within 5 s, whole-request limit of 5 s / none", 1.05,
        "5 %; that who was not given up had his answer within the limit is no finding", 1.0,
    ),
    at_least(
        "and keeps the throughput", "throughput, whole-request limit of 5 s / none", 0.95, _PAYS
    ),
)  # fmt: skip
def workers(lab: Lab) -> Iterator[Finding]:
    """Simulate 1 to 4 engines on one A100, two ways to balance four replicas, and a limit of 5 s under overload."""
    yield _several_workers()
    yield _balancing()
    yield from _timeout()


def _several_workers() -> Finding:
    """Llama-2-7B: 6.6 ms to read the weights, 86 µs a token; the engines take turns and divide the memory."""
    from vllm_teach.kvcache.length_mix import LengthMix
    from vllm_teach.performance.fleet import simulate_fleet
    from vllm_teach.performance.shared_device import SharedDeviceCost

    jobs = _arrivals(120, None, LengthMix("chat", 300, 200, max_prompt=1500))
    rates = {}
    for number in (1, 2, 3, 4):
        blocks = int((0.9 * 80e9 - number * 13.5e9) / number / (16 * 512 * 1024))
        cost = SharedDeviceCost(step=6.6e-3, token=86e-6, workers=number)
        room: dict[str, Any] = {"num_blocks": blocks, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
        rates[number] = simulate_fleet(jobs, cost, number, "round_robin", **room).throughput
    best = max(rates[number] for number in (2, 3, 4)) / rates[1]
    return modelled(
        "throughput, the best of 2 to 4 workers / 1", best, "x",
        f"Llama-2-7B on an A100 80GB: {', '.join(f'{n}: {rate:.0f} tokens/s' for n, rate in rates.items())}",
    )  # fmt: skip


def _balancing() -> Finding:
    """Four replicas near their limit, lengths as users bring them, five streams of arrivals: the median counts."""
    from vllm_teach.kvcache.length_mix import LengthMix
    from vllm_teach.performance.fleet import simulate_fleet
    from vllm_teach.performance.virtual_time import StepCost

    mix = LengthMix("chat", 200, 100, max_prompt=1000)
    ratios = []
    for seed in range(5):
        arrivals = _arrivals(200, 28.0, mix, seed)
        turns, least = (
            simulate_fleet(arrivals, StepCost(), 4, policy, max_num_seqs=8).to_first_token(0.99)
            for policy in ("round_robin", "least_conn")
        )
        ratios.append(turns / least)
    return modelled(
        "p99 of the first token, round robin / least_conn", statistics.median(ratios), "x",
        f"4 replicas of 8 places near their limit, 10 ms a step; 5 streams: {min(ratios):.1f} to {max(ratios):.1f}",
    )  # fmt: skip


def _timeout() -> Iterator[Finding]:
    """One replica at twice its load: no limit, 5 s in the queue, 5 s for the whole request."""
    from vllm_teach.kvcache.length_mix import LengthMix
    from vllm_teach.performance.fleet import Patience, simulate_fleet
    from vllm_teach.performance.virtual_time import StepCost

    arrivals = _arrivals(200, 12.0, LengthMix("chat", 200, 100, max_prompt=1000), seed=2)
    limits = {"none": Patience(), "queue": Patience(queue=5), "whole": Patience(total=5)}
    runs: dict[str, FleetRun] = {
        name: simulate_fleet(arrivals, StepCost(), 1, patience=limit, max_num_seqs=8) for name, limit in limits.items()
    }
    none, setting = runs["none"], "one replica at twice its load, 200 requests"
    for name, words in (("whole", "whole-request limit of 5 s"), ("queue", "limit of 5 s in the queue")):
        in_time = _in_time(runs[name]) / _in_time(none)
        rate = runs[name].throughput / none.throughput
        wasted = runs[name].wasted_tokens / runs[name].computed_tokens
        yield modelled(
            f"answered within 5 s, {words} / none", in_time, "x",
            f"{setting}; {_in_time(runs[name])} and {_in_time(none)} of them",
        )  # fmt: skip
        yield modelled(f"throughput, {words} / none", rate, "x", f"{setting}; {wasted:.0%} computed for nobody")


def _in_time(run: FleetRun) -> int:
    """Return how many requests had their whole answer within 5 s."""
    return sum(times.latency <= 5 for times in run.answered)


def _arrivals(count: int, rate: float | None, mix: LengthMix, seed: int = 0) -> list[Arrival]:
    from vllm_teach.performance.virtual_time import Arrival

    source, moment, arrivals = random.Random(seed), 0.0, []
    for prompt, output in mix.draw(count, seed):
        arrivals.append(Arrival(prompt, output, time=moment))
        moment += source.expovariate(rate) if rate else 0.0
    return arrivals
