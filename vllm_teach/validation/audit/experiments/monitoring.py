"""The metrics to monitor: each exported by a served engine, and compared with what was counted beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_teach.errors import MissingDependencyError, installs
from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.check import Check, at_least, near
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, counted, measured
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.outputs import RequestOutput
    from vllm_teach.serving.metrics.scrape import Scrape
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics

_TABLE = "metrics-to-monitor"
_NOT_FORWARD = ("bookkeeping", "sampling", "batch inputs")
_SETTING = "the tiny model served in this process, 12 requests of two texts, their prompts sharing a beginning"


def _equal(part: str, name: str) -> Check:
    return near(
        part, f"{name}, exported / counted", 1.0, 1.01, "one per cent: both count the same events once", neutral=None
    )


@dataclass(frozen=True)
class Served:
    """A served run: what `/metrics` said at its end, what the clients got, and what was counted beside it."""

    scrape: Scrape
    outputs: list[RequestOutput]
    steps: int
    layers: int
    host_share: float
    device_share: float | None
    refused: int


def _missing() -> MissingDependencyError:
    return MissingDependencyError(f"prometheus-client is not installed: run {installs('serve')}.")


def exported_metrics() -> dict[str, str]:
    """Return the kind of every metric that a server exports. Raises MissingDependencyError without the extra."""
    try:
        from vllm_teach.serving.metrics.server_metrics import describe_metrics
    except ImportError as error:
        raise _missing() from error
    return {each.name: each.kind for each in describe_metrics()}


def serve_tiny(lab: Lab) -> Served:
    """Serve requests, one of them wrong, with the engine's loop and messages; read its metrics as Prometheus does."""
    exported_metrics()
    import psutil

    from vllm_teach import LLM
    from vllm_teach.engine.events import StepEnded
    from vllm_teach.serving.metrics.scrape import read_scrape
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics

    llm = LLM("tiny", device=lab.device, num_kv_blocks=128, max_num_seqs=8)
    metrics = ServerMetrics("tiny")
    outputs, refused = asyncio.run(_serve(llm, metrics))
    host, device = psutil.virtual_memory().percent / 100, _device_share(lab)
    scrape = read_scrape(metrics.render()[0].decode(), time.monotonic())
    steps = sum(event.num_prefill_tokens + event.num_decode_tokens > 0 for event in llm.engine.events.of(StepEnded))
    return Served(scrape, outputs, steps, llm.model.config.num_layers, host, device, refused)


def _device_share(lab: Lab) -> float | None:
    """Return the share of the GPU's memory that is in use, by anyone; None on a processor."""
    if not lab.on_gpu:
        return None
    import torch

    free, total = torch.cuda.mem_get_info(lab.device)
    return 1 - free / total


async def _serve(llm: LLM, metrics: ServerMetrics) -> tuple[list[RequestOutput], int]:
    from vllm_teach import SamplingParams
    from vllm_teach.errors import PromptTooLongError
    from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine

    engine = AsyncLLMEngine.of(llm, on_report=metrics.on_report, on_finished=metrics.on_finished)
    metrics.on_ready(await engine.start())
    refused = 0
    try:
        params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True)
        prompts = [{"prompt_token_ids": [*range(10, 42), number]} for number in range(50, 62)]
        outputs = []
        for wave in (prompts[:4], prompts[4:]):  # the second finds what the first has computed
            outputs += await asyncio.gather(*(engine.generate(prompt, params) for prompt in wave))
        try:
            await engine.generate({"prompt_token_ids": [7] * 600}, params)
        except PromptTooLongError as error:
            metrics.on_error(error)
            refused += 1
        await engine.drain(60)
    finally:
        await engine.stop()
    return outputs, refused


@experiment(
    _TABLE,
    "tokens_per_second_per_gpu",
    _equal("the tokens behind the rate are right", "tokens generated"),
    at_least("the rate is exported for each device", "rate gauges above 0", 1.0, "one device served, and had work"),
)
def tokens_per_second(lab: Lab) -> Iterator[Finding]:
    """Compare the counter of generated tokens with what the clients got, and read the gauge made of it."""
    served = lab.once(serve_tiny)
    got = sum(len(each.token_ids) for output in served.outputs for each in output.outputs)
    exported = served.scrape.value("vllm:generation_tokens_total")
    yield counted("tokens generated, exported / counted", exported / got, "x", _SETTING)
    rate = served.scrape.value("vllm_teach:tokens_per_second_per_device")
    yield counted("rate gauges above 0", float(rate > 0), "", f"it says {rate:,.0f} tokens/s; {_SETTING}")


@experiment(
    _TABLE,
    "p99_generation_latency",
    at_least("it lies in the bucket that the metrics name", "p99 within its bucket", 1.0, "it must, for any latencies"),
)
def p99(lab: Lab) -> Iterator[Finding]:
    """Find the bucket of the exported histogram in which the 99th percentile lies, and the true one by the outputs."""
    from vllm_teach.performance.virtual_time import quantile

    served = lab.once(serve_tiny)
    latencies = [output.metrics.e2e_latency or 0.0 for output in served.outputs if output.metrics is not None]
    true = quantile(latencies, 0.99)
    buckets = served.scrape.buckets("vllm:e2e_request_latency_seconds")
    rank, low = 0.99 * buckets[-1][1], 0.0
    for high, count in buckets:
        if count >= rank:
            break
        low = high
    yield counted(
        "p99 within its bucket", float(low < true <= high), "",
        f"{true * 1e3:.0f} ms, bucket {low * 1e3:.0f} to {high * 1e3:.0f} ms; a gauge could not tell; {_SETTING}",
    )  # fmt: skip


@experiment(
    _TABLE,
    "memory_utilisation_gpu_and_host",
    *(
        near(
            f"the {place}'s is exported", f"{place} memory, exported / counted", 1.0, 1.1,
            "a tenth: others on the machine take and give memory between two looks", neutral=None,
        )
        for place in ("host", "GPU")
    ),
)  # fmt: skip
def memory(lab: Lab) -> Iterator[Finding]:
    """Compare the host's share with psutil's, and read the device's where there is one."""
    served = lab.once(serve_tiny)
    exported = served.scrape.value("vllm_mem_usage", memory="host")
    yield counted("host memory, exported / counted", exported / served.host_share, "x", _SETTING)
    by_place = served.scrape.by_label("vllm_mem_usage", "memory")
    if served.device_share is not None:
        yield counted("GPU memory, exported / counted", by_place["device"] / served.device_share, "x", _SETTING)


@experiment(
    _TABLE,
    "error_rate_oom_count_apart",
    _equal("errors are counted by kind", "prompts too long"),
    at_least("out of memory has a count of its own", "counters of out of memory", 2.0, "of requests, and of steps"),
)
def errors(lab: Lab) -> Iterator[Finding]:
    """Send a prompt that is too long, and look for it, and for out of memory apart, among the counters."""
    served = lab.once(serve_tiny)
    kinds = served.scrape.by_label("vllm_teach:request_errors_total", "kind")
    yield counted("prompts too long, exported / counted", kinds["prompt_too_long"] / served.refused, "x", _SETTING)
    apart = ("out_of_memory" in kinds) + ("vllm_teach:out_of_memory_total" in exported_metrics())
    yield counted("counters of out of memory", apart, "", ", ".join(kinds))


@experiment(
    _TABLE,
    "share_of_time_spent_in_attention",
    near(
        "it is that of an independent measurement", "attention share, exported / by PyTorch's profiler", 1.0, 2.0,
        "a factor of 2: the profiler slows what it watches, short operations most", neutral=None,
    ),
)  # fmt: skip
def attention_share(lab: Lab) -> Iterator[Finding]:
    """Compare the meter's share in decode steps with that of PyTorch's profiler in steps of the same requests."""
    from vllm_teach import LLM, data
    from vllm_teach.performance.step_profile import KINDS, measure_step_parts, profile_steps
    from vllm_teach.performance.workload import draw_workload

    llm = LLM("tiny", device="cpu", num_kv_blocks=256, enable_prefix_caching=False)
    ids = llm.tokenizer.encode(data.path("texts/corran_sound.txt").read_text(encoding="utf-8"))
    workload = draw_workload(ids, 8, inputs=(200, 250), outputs=(1, 1))
    meter = llm.engine.runner.meter
    exported: list[float] = []
    ratios: list[float] = []
    for _ in range(5):
        profile = profile_steps(llm, workload, 5)
        layers = {kind: profile.shares[kind] for kind in KINDS if kind not in _NOT_FORWARD}
        meter.settle()
        before = meter.attention_seconds, meter.forward_seconds
        measure_step_parts(llm, workload, 20)
        meter.settle()
        exported.append((meter.attention_seconds - before[0]) / (meter.forward_seconds - before[1]))
        ratios.append(exported[-1] / (layers["attention"] / sum(layers.values())))
    share = Timing.of(exported).median
    yield measured(
        "attention share, exported / by PyTorch's profiler", Timing.of(ratios), "x",
        f"the meter says {share:.2f} of the forward pass; the tiny model, 8 sequences of some 230 tokens",
    )  # fmt: skip


@experiment(_TABLE, "kv_cache_hit_rate", _equal("tokens found are those that were not computed", "tokens found"))
def hit_rate(lab: Lab) -> Iterator[Finding]:
    """Compare the counters of looked-up and found tokens with what each request says of itself."""
    served = lab.once(serve_tiny)
    hits = served.scrape.value("vllm:prefix_cache_hits_total")
    found = sum(output.num_cached_tokens for output in served.outputs)
    yield counted("tokens found, exported / counted", hits / found, "x", _SETTING)
    rate = hits / served.scrape.value("vllm:prefix_cache_queries_total")
    yield counted("hit rate", rate, "of all tokens of prompts", _SETTING)


@experiment(
    _TABLE,
    "memory_fragmentation_rate",
    _equal("internal fragmentation is the empty part of held blocks", "empty slots of held blocks"),
)
def fragmentation(lab: Lab) -> Iterator[Finding]:
    """Hold three sequences of known lengths, and compare the exported share with the slots that must be empty."""
    from vllm_teach import LLM, SamplingParams

    exported_metrics()
    from vllm_teach.serving.metrics.engine_figures import CACHE
    from vllm_teach.serving.metrics.step_reporter import StepReporter

    llm = LLM("tiny", device="cpu", num_kv_blocks=32, enable_prefix_caching=False)
    lengths = (5, 17, 40)
    for length in lengths:
        llm.engine.add_request({"prompt_token_ids": list(range(5, 5 + length))}, SamplingParams(max_tokens=4))
    llm.engine.step()
    report = StepReporter(llm.engine).report()
    figure = next(each for each in CACHE if each.name == "vllm_teach:kv_cache_fragmentation_ratio")
    slots = sum(-(-length // 16) * 16 for length in lengths)
    empty = 1 - sum(lengths) / slots
    setting = f"sequences of {', '.join(map(str, lengths))} tokens in blocks of 16"
    ratio = figure.read(report)["internal"] / empty
    yield counted("empty slots of held blocks, exported / counted", ratio, "x", setting)


@experiment(
    _TABLE,
    "call_frequency_of_each_attention_implementation",
    _equal("every layer of every step is one call", "attention calls"),
)
def calls(lab: Lab) -> Iterator[Finding]:
    """Compare the exported calls of all backends with the layers of all steps that computed something."""
    served = lab.once(serve_tiny)
    exported = served.scrape.by_label("vllm_teach:attention_calls_total", "backend")
    yield counted(
        "attention calls, exported / counted", sum(exported.values()) / (served.steps * served.layers), "x",
        f"{', '.join(f'{name} {count:.0f}' for name, count in exported.items())}; {_SETTING}",
    )  # fmt: skip
