"""When requests that are sent all at once begin and end, and whether the server still answers in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.performance.load_test.target import Target, ask


@dataclass(frozen=True)
class Spans:
    """(begin, end) in seconds from the first of each request, in the order they were sent, and of each health check."""

    requests: tuple[tuple[float, float], ...]
    health: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        """When the last request had its answer."""
        return max((end for _, end in self.requests), default=0.0)

    @property
    def slowest_health(self) -> float:
        """The longest that a health check took; 0 where there was none."""
        return max((end - begin for begin, end in self.health), default=0.0)


async def measure_spans(
    target: Target, requests: Sequence[tuple[list[int], int]], *, model: str, every: float = 0.02
) -> Spans:
    """Ask for all completions, (prompt token ids, max_tokens), at once; ask `/health` every so many seconds meanwhile.

    A health check begins only when the one before has its answer. One that is open when the last request ends is waited
    for: it may be the only one, and have waited for all. Raises ServerError for what is not answered with 200.
    """
    async with target.session() as session:
        await ask(session, target, "/health")  # the first connection of a process costs more
        start, health = time.perf_counter(), []

        async def timed(path: str, body: dict[str, object] | None = None) -> tuple[float, float]:
            begin = time.perf_counter() - start
            await ask(session, target, path, body)
            return begin, time.perf_counter() - start

        async def keep_asking(meanwhile: Sequence[asyncio.Task[tuple[float, float]]]) -> None:
            while not all(task.done() for task in meanwhile):
                health.append(await timed("/health"))
                await asyncio.sleep(every)

        async def ask_all() -> list[tuple[float, float]]:
            bodies = [
                {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
                for prompt, most in requests
            ]
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(timed("/v1/completions", body)) for body in bodies]
                await asyncio.sleep(every)
                tasks.create_task(keep_asking(asked))
            return [task.result() for task in asked]

        try:
            return Spans(tuple(await ask_all()), tuple(health))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
