"""Advice on deployment: hardware, versions, a configuration, gauges, AWQ in eager mode; and a model of 200 billion."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import Undecidable, at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, documented, modelled
from vllm_teach.validation.audit.lab import Lab

_TABLE = "A-deployment"
_PAYS = "5 %: less than that is not worth a rule"
_GIB = 2**30
_STEPS = {"a prompt": 2048, "a token of one sequence": 1}


def _step_seconds(link: str | None, *, tokens: int = 2048, eager: bool = False, **settings: Any) -> float:
    """Return the modelled seconds of a step of Llama-2-70B on eight A100s: a prompt, or a decode of `tokens`."""
    from vllm_teach.performance.cost_model.efficiency import assumed_efficiency
    from vllm_teach.performance.cost_model.links import get_link
    from vllm_teach.performance.cost_model.step_cost import ModelledStep
    from vllm_teach.performance.cost_model.step_shape import StepShape
    from vllm_teach.performance.model_shapes import get_model_shape

    hardware = a100.card(a100.CARDS[1])
    step = ModelledStep(
        get_model_shape("llama-2-70b"),
        hardware,
        assumed_efficiency(hardware, eager=eager),
        dtype="float16",
        tensor_parallel_size=8,
        link=None if link is None else get_link(link),
        **settings,
    )
    shape = StepShape(1, tokens, 1, chunks=((0, tokens),))
    return sum(step.parts_of(shape, 16).values())


@experiment(
    _TABLE,
    "hardware_a100_80gb_512_gb_ddr4_3200_host_memory",
    *(
        at_least(
            f"100 Gb/s is required for one model over machines: {what}", f"{what}, 10 Gb/s Ethernet / 100 Gb/s RDMA",
            2.0, "what takes less than twice as long without it is better with it, and not impossible without it", 1.0,
        )
        for what in _STEPS
    ),
    at_most(
        "100 Gb/s is enough for it", "a prompt, 100 Gb/s RDMA / NVLink", 1.5,
        "less than half again as slow as within a machine",
    ),
    at_most(
        "512 GB of host memory are enough", "weights and swap space of eight devices / 512 GB", 1.0, "sizes alone",
    ),
)  # fmt: skip
def hardware(lab: Lab) -> Iterator[Finding]:
    """Model a prompt and a decode step of Llama-2-70B, tensor parallel over eight A100s, on three links."""
    for what, tokens in _STEPS.items():
        fast, rdma, slow = (_step_seconds(link, tokens=tokens) for link in ("nvlink3", "rdma-100g", "ethernet-10g"))
        setting = f"Llama-2-70B, tensor parallel over 8 x A100, {tokens:,} new; replicas need no link at all"
        yield modelled(f"{what}, 10 Gb/s Ethernet / 100 Gb/s RDMA", slow / rdma, "x", setting)
        yield modelled(f"{what}, 100 Gb/s RDMA / NVLink", rdma / fast, "x", setting)
    needed = 2 * a100.PARAMETERS_70B + 8 * 20 * _GIB
    yield arithmetic(
        "weights and swap space of eight devices / 512 GB", needed / 512e9, "",
        f"138 GB while loading and 8 x 20 GiB of swap space are {needed / 1e9:.0f} GB",
    )  # fmt: skip


@experiment(
    _TABLE,
    "python_3.9_vllm_0.2.4_with_torch_2.0.1",
    at_most(
        "vllm 0.2.4 goes with torch 2.0.1", "torch that vllm 0.2.4 asks for, at least", 2.0,
        "the claim's own version; a package manager refuses anything below what is asked for",
    ),
)  # fmt: skip
def versions(lab: Lab) -> Iterator[Finding]:
    """Compare the versions that are named together with what the package itself requires."""
    yield documented(
        "torch that vllm 0.2.4 asks for, at least", 2.1, "",
        "vllm 0.2.4's own requirement torch >= 2.1.0, as the reference tables' caveat records it",
    )  # fmt: skip


@experiment(
    _TABLE,
    "llm_model_llama_2_70b_chat_tensor_parallel_size",
    at_least("these arguments exist", "arguments that LLM takes", 1.0, "all of them must"),
    at_most("the model fits", "weights of a device / its usable memory", 1.0, "sizes alone, at 90 % utilisation"),
    at_least(
        "and leaves room for requests", "sequences of 2,560 tokens that fit", 2.0, "fewer than two would be no service"
    ),
)
def configuration(lab: Lab) -> Iterator[Finding]:
    """Look for the arguments in our `LLM`, which has vLLM's names, and split the memory of eight A100s."""
    from vllm_teach import LLM
    from vllm_teach.performance.simulator.deployment import deploy

    wanted = ("model", "tensor_parallel_size", "block_size", "swap_space")
    there = sum(name in inspect.signature(LLM).parameters for name in wanted) / len(wanted)
    yield counted("arguments that LLM takes", there, "of them", ", ".join(wanted))
    deployment = deploy(
        "llama-2-70b", a100.CARDS[1], tensor_parallel_size=8, dtype="float16", block_size=16, swap_space=20
    )
    memory = deployment.memory
    setting = f"8 x A100 80GB, {memory.weights / 1e9:.1f} GB of weights on each"
    yield arithmetic("weights of a device / its usable memory", memory.weights / memory.usable, "", setting)
    yield arithmetic("sequences of 2,560 tokens that fit", deployment.num_blocks * 16 // 2560, "", setting)


@experiment(
    _TABLE,
    "metrics_as_gauges_vllm_tokens_per_sec_vllm_mem",
    at_least("both can be exported as gauges", "gauges of these names", 1.0, "both of them"),
    at_most(
        "a gauge tells the throughput", "tokens/s by the gauge's scrapes, error at the worst moment", 0.1,
        "a tenth: a dashboard that is off by more misleads",
    ),
)  # fmt: skip
def gauges(lab: Lab) -> Iterator[Finding]:
    """Look both up among our metrics, and scrape the rate gauge every 15 s beside the counter, on a virtual clock."""
    from vllm_teach.validation.audit.experiments.monitoring import exported_metrics

    kinds = exported_metrics()
    names = ("vllm_tokens_per_sec", "vllm_mem_usage")
    there = sum(kinds.get(name) == "gauge" for name in names) / len(names)
    yield counted("gauges of these names", there, "of them", ", ".join(names))
    worst = max((_read_by_gauge(first) for first in range(15)), key=lambda ratio: abs(ratio - 1))
    yield counted(
        "tokens/s by the gauge's scrapes, error at the worst moment", abs(worst - 1), "of the counter's",
        f"bursts of 5 s a minute; the gauge, a mean of 10 s scraped every 15 s, says {worst:.2f} times as many",
    )  # fmt: skip


def _read_by_gauge(first: int) -> float:
    """Return the mean of a rate gauge's scrapes over the true rate, for bursts that begin `first` seconds in."""
    from vllm_teach.performance.virtual_time import VirtualClock
    from vllm_teach.serving.metrics.recent_growth import RecentGrowth

    clock = VirtualClock()
    recent, scraped, total = RecentGrowth(10.0, clock), [], 0
    for second in range(240):
        clock.now = second + 1.0
        tokens = 1000 if first <= second % 60 < first + 5 else 0
        recent.add(tokens)
        total += tokens
        if (second + 1) % 15 == 0:
            scraped.append(recent.per_second())
    return sum(scraped) / len(scraped) / (total / 240)


@experiment(
    _TABLE,
    "quantization_awq_together_with_enforce_eager",
    at_least("the two work together", "tokens generated / asked for", 1.0, "every token that was asked for"),
    at_most(
        "eager mode costs nothing", "decode step in 4 bits, eager / CUDA graphs", 1.05, _PAYS
    ),
)  # fmt: skip
def awq_eager(lab: Lab) -> Iterator[Finding]:
    """Generate with AWQ weights and enforce_eager here, and model the kernel launches of eager mode on eight A100s."""
    from vllm_teach import LLM, SamplingParams, data
    from vllm_teach.models import load_tokenizer, resolve_model
    from vllm_teach.models.quantize import quantize_model
    from vllm_teach.performance.cost_model.weight_format import get_weight_format
    from vllm_teach.quantization.quantization_config import QuantizationConfig
    from vllm_teach.training.calibration_text import calibration_ids

    source = resolve_model("tiny")
    ids = calibration_ids(data.path("texts/corran_sound.txt"), load_tokenizer(source), samples=2, length=64)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "tiny-awq"
        quantize_model(source, target, QuantizationConfig.choose("awq"), ids, progress=False)
        llm = LLM(target, quantization="awq", enforce_eager=True, device="cpu", num_kv_blocks=8)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        done = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    yield counted("tokens generated / asked for", len(done) / 8, "", "the tiny model by AWQ, on a processor")
    weights = get_weight_format("awq", "float16")
    eager, graphs = (_step_seconds(None, tokens=1, eager=each, weights=weights) for each in (True, False))
    yield modelled(
        "decode step in 4 bits, eager / CUDA graphs", eager / graphs, "x",
        "Llama-2-70B on 8 x A100, one sequence; a kernel launch is assumed to take 5 µs, in a graph 1 µs",
    )  # fmt: skip


@experiment(
    "B-motivation",
    "a_200b_parameter_dialogue_model_15_s_per",
    at_least("more than 40 GB of memory", "weights in float16", 40.0, "the claim's own bound"),
    Undecidable("15 s per inference", "how many tokens an inference is, and on which and how many devices"),
)
def motivation(lab: Lab) -> Iterator[Finding]:
    """Compute the weights, the devices that hold them, and how many tokens they generate in 15 s."""
    weights = 2 * 200e9
    yield arithmetic("weights in float16", weights / 1e9, "GB", "200e9 parameters, two bytes each: ten times the bound")
    hardware = a100.card(a100.CARDS[1])
    devices = math.ceil(weights / (0.9 * hardware.memory_bytes))
    yield arithmetic("A100s of 80GB that hold them", devices, "", "at 90 % of the memory, without any cache")
    token = weights / devices / (0.8 * hardware.memory_bandwidth)
    yield modelled(
        "tokens in 15 s", 15 / token, "tokens", f"{devices} x A100 80GB, one sequence: {token * 1e3:.0f} ms a token"
    )
