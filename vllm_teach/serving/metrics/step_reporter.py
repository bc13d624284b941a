"""The engine's side of the metrics: its figures of the moment as a `StepReport`, at a bounded cost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import psutil
import torch

from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.kvcache.usage import CacheUsage
from vllm_teach.serving.metrics.step_report import StepReport
from vllm_teach.serving.metrics.token_latencies import TokenLatencies

# A look at every block takes milliseconds where there are ten thousands of them.
BLOCK_LOOK_SHARE = 0.002
MEMORY_INTERVAL = 1.0


class StepReporter:
    """Reads an engine between two steps, in the thread that steps it, which tells `latencies` of the tokens.

    Looks at every block take no more than `BLOCK_LOOK_SHARE` of the time, and memory is measured once in
    `MEMORY_INTERVAL` seconds of `clock`: that of this process and of the ranks that it has started.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self.engine_id = uuid.uuid4().hex
        self.latencies = TokenLatencies()
        self._clock = clock
        children = engine.ranks.processes if engine.ranks is not None else None
        self._processes = [psutil.Process(), *map(psutil.Process, children.pids if children is not None else ())]
        self._usage: CacheUsage | None = None
        self._next_look = self._next_memory = clock()
        self._memory: tuple[int, tuple[int, int] | None] = (0, None)

    def report(self) -> StepReport:
        """Return the figures of this moment. Cheap enough for ten times a second, and for each time of going idle."""
        engine = self.engine
        scheduler, totals, meter, last = engine.scheduler, engine.totals, engine.runner.meter, engine.last_step
        queues = (scheduler.waiting, scheduler.running, scheduler.swapped)
        meter.settle()
        memory_bytes, device_memory = self._measure_memory()
        return StepReport(
            step=engine.events.step,
            seconds=last.seconds if last else 0.0,
            prefill_tokens=last.num_prefill_tokens if last else 0,
            decode_tokens=last.num_decode_tokens if last else 0,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + sum(len(sequence.forks) for queue in queues for sequence in queue),
            swapped=len(scheduler.swapped),
            usage=self._measure_usage(),
            preemptions=dict(scheduler.preemptions),
            out_of_memory=totals.out_of_memory,
            forward_seconds=meter.forward_seconds,
            attention_seconds=meter.attention_seconds,
            attention_calls=dict(meter.calls),
            memory_bytes=memory_bytes,
            device_memory=device_memory,
            engine_id=self.engine_id,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            computed_prompt_tokens=totals.prefill_tokens,
            step_tokens=totals.tokens.read(),
            step_seconds=totals.seconds.read(),
            first_token_seconds=self.latencies.first.read(),
            inter_token_seconds=self.latencies.between.read(),
        )

    def _measure_usage(self) -> CacheUsage:
        now = self._clock()
        if self._usage is None or now >= self._next_look:
            self._usage = self.engine.kv.usage()
            end = self._clock()
            self._next_look = end + (end - now) / BLOCK_LOOK_SHARE
        else:
            self._usage = self.engine.kv.renew(self._usage)
        return self._usage

    def _measure_memory(self) -> tuple[int, tuple[int, int] | None]:
        now = self._clock()
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_INTERVAL
            self._memory = sum(map(_resident_bytes, self._processes)), _device_memory(self.engine.model.device)
        return self._memory


def _resident_bytes(process: psutil.Process) -> int:
    """Return what `process` holds of the host's memory; 0 once it has ended, which the engine itself notices."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _device_memory(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total
