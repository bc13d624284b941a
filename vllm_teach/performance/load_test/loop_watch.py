"""How far the load client's own event loop is behind: a client that comes late to an answer measures itself.

Every few milliseconds an answer could arrive. The watch is due at each of these instants, and notes how late it came;
instants that a busy loop let pass are noted too, each with its own delay. So its figures are those that an answer meets
that arrives at any time: the share of them that is late is the share of time in which this client was the bottleneck.
"""

from __future__ import annotations

import asyncio
import time

from vllm_teach.performance.load_test.log_histogram import LogHistogram

INTERVAL = 5e-3  # seconds
LATE = 2e-3  # seconds
# Python rounds its timeouts up to whole milliseconds. That makes the watch late, not an answer, which wakes the loop.
ROUNDING = 1e-3


class LoopWatch:
    """Watches the loop in which `watch` runs: `delays` in seconds, and the processor time of its thread."""

    def __init__(self) -> None:
        self.delays = LogHistogram()
        self._late = 0
        self._begun = self._cpu_begun = self._next = 0.0
        self._wall = self._cpu = 0.0

    @property
    def behind(self) -> float:
        """The share of time, 0 to 1, in which the loop was more than `LATE` behind."""
        return self._late / self.delays.count if self.delays.count else 0.0

    @property
    def cpu(self) -> float:
        """Processor seconds of the loop's thread per second: 1 is a whole core, and no more can be had."""
        return self._cpu / self._wall if self._wall else 0.0

    def start(self, now: float, cpu: float) -> None:
        """Begin at `now`, with the thread's processor time at `cpu`, both in seconds."""
        self._begun, self._cpu_begun, self._next = now, cpu, now + INTERVAL

    def note(self, now: float, cpu: float) -> float:
        """Note all instants up to `now`; return the seconds until the next one."""
        while self._next <= now:
            delay = max(0.0, now - self._next - ROUNDING)
            self.delays.add(delay)
            self._late += delay > LATE
            self._next += INTERVAL
        self._wall, self._cpu = now - self._begun, cpu - self._cpu_begun
        return self._next - now

    async def watch(self) -> None:
        """Watch until cancelled."""
        self.start(time.perf_counter(), time.thread_time())
        while True:
            await asyncio.sleep(self.note(time.perf_counter(), time.thread_time()))

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain data."""
        return {"behind_share": self.behind, "late_seconds": LATE, "cpu": self.cpu, "delay": self.delays.summary()}
