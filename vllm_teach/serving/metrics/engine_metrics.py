"""The metrics of an engine: who runs, what was computed, how the KV cache fares, where time and memory go."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from vllm_teach.serving.async_engine.messages import EngineReady
from vllm_teach.serving.metrics.engine_figures import ENGINE_FIGURES, QUEUES, Figure
from vllm_teach.serving.metrics.followers import ByLabel, Distribution, Follower, Level, Total
from vllm_teach.serving.metrics.instruments import Instruments
from vllm_teach.serving.metrics.recent_growth import RecentGrowth
from vllm_teach.serving.metrics.step_report import StepReport

RATE_WINDOW = 10.0  # seconds


class EngineMetrics:
    """Follows the reports of an engine, and of the one that is started in its place: counters go on.

    The first report of an engine says where it begins: what it did before, as an LLM that was used and is now served
    has, is not counted.

    Beside `ENGINE_FIGURES` there are the source article's two gauges, `vllm_tokens_per_sec` and `vllm_mem_usage`, and
    the share of attention. Rates and shares look back `RATE_WINDOW` seconds of `clock`.
    """

    def __init__(self, make: Instruments, clock: Callable[[], float]) -> None:
        self._last: StepReport | None = None
        self._num_devices = 1
        self._figures = [(figure, _follower(make, figure)) for figure in ENGINE_FIGURES]
        self._generated, self._forward, self._attention = (RecentGrowth(RATE_WINDOW, clock) for _ in range(3))
        self._add_rates(make)
        self._add_memory(make)
        self._up = make.gauge("vllm_teach:engine_up", "Whether the engine lives, 1 or 0.")
        self._starts = make.counter("vllm_teach:engine_starts_total", "Engines that this server has had.")
        self._cache_info = make.gauges(
            "vllm:cache_config_info", "What the KV cache is, as labels; always 1.", "block_size", "num_gpu_blocks"
        )
        self._engine_info = make.gauges(
            "vllm_teach:engine_info", "What the engine is, as labels; always 1.", "dtype", "device", "max_model_len"
        )

    def on_ready(self, ready: EngineReady) -> None:
        """Tell what the engine is."""
        self._up.set(1)
        self._num_devices = ready.num_devices
        self._cache_info(str(ready.block_size), str(ready.num_blocks)).set(1)
        self._engine_info(ready.dtype, ready.device, str(ready.max_model_len)).set(1)

    def on_report(self, report: StepReport) -> None:
        """Take an engine's figures."""
        before = self._last
        if before is None or before.engine_id != report.engine_id:
            before = report
            self._starts.inc()
            for figure, follower in self._figures:
                follower.begin(figure.read(report))
        self._up.set(1)
        for figure, follower in self._figures:
            follower.follow(figure.read(report))
        self._generated.add(report.generation_tokens - before.generation_tokens)
        self._forward.add(report.forward_seconds - before.forward_seconds)
        self._attention.add(report.attention_seconds - before.attention_seconds)
        if self._forward.growth() > 0:  # else what it was when there was work
            self._share.set(self._attention.growth() / self._forward.growth())
        self._engine_memory.set(report.memory_bytes or 0)
        if report.device_memory is not None:
            used, total = report.device_memory
            self._memory("device").set(used / total)
        self._last = report

    def on_dead(self) -> None:
        """The engine is gone, and whatever it had with it; nothing more is reported."""
        self._up.set(0)
        for figure, follower in self._figures:
            if figure in QUEUES and figure.kind == "gauge":
                follower.follow(0)

    def _add_rates(self, make: Instruments) -> None:
        speed, window = self._generated.per_second, f"mean of the last {RATE_WINDOW:g} s"
        make.gauge("vllm_tokens_per_sec", f"Tokens generated per second, {window}.").set_function(speed)
        make.gauge("vllm_teach:tokens_per_second_per_device", f"The same for each device, {window}.").set_function(
            lambda: speed() / self._num_devices
        )
        self._share = make.gauge(
            "vllm_teach:attention_time_share", f"Share of attention in the forward pass, 0 to 1, {window} with work."
        )

    def _add_memory(self, make: Instruments) -> None:
        self._memory = make.gauges(
            "vllm_mem_usage", "Share of all memory in use, by anyone, 0 to 1: the host's, and the device's.", "memory"
        )
        self._memory("host").set_function(lambda: psutil.virtual_memory().percent / 100)
        self._engine_memory = make.gauge(
            "vllm_teach:engine_memory_bytes", "Host memory that the engine's processes hold."
        )


def _follower(make: Instruments, figure: Figure) -> Follower:
    name, text, label = figure.name, figure.text, figure.label
    if figure.kind == "histogram":
        return Distribution(make.histogram(name, text, figure.bounds))
    if figure.kind == "gauge":
        if label is None:
            return Level(make.gauge(name, text))
        levels = make.gauges(name, text, label)
        return ByLabel(lambda value: Level(levels(value)), figure.values)
    if label is None:
        return Total(make.counter(name, text))
    totals = make.counters(name, text, label)
    return ByLabel(lambda value: Total(totals(value)), figure.values)
