"""A loop that is held up is told of, for as long as it was; on a loop whose time is the test's."""

import asyncio
import time

import pytest

from vllm_teach.serving.metrics.event_loop_lag import watch_event_loop


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while something runs, and jumps to the next timer when nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


def run(work) -> list[float]:
    lags: list[float] = []

    async def main() -> None:
        async with watch_event_loop(lags.append, interval=0.125):
            await work(asyncio.get_running_loop())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return lags


def test_an_idle_loop_is_on_time() -> None:
    async def sleep(loop) -> None:
        await asyncio.sleep(1.0625)

    assert run(sleep) == [0.0] * 8


def test_a_stall_counts_for_every_tick_that_fell_into_it() -> None:
    async def stall(loop) -> None:
        await asyncio.sleep(0.25 + 0.0625)
        loop.now += 0.5  # something computes in the loop
        await asyncio.sleep(0.25)

    # Ticks at 0.125, 0.25; then 0.375 to 0.75 are seen at 0.8125; then 0.875 and 1.0.
    assert run(stall) == [0.0, 0.0, 0.4375, 0.3125, 0.1875, 0.0625, 0.0, 0.0]


def test_what_the_observer_raises_is_raised_at_the_end() -> None:
    def refuse(lag: float) -> None:
        raise ValueError("no such metric")

    async def main() -> None:
        async with watch_event_loop(refuse, interval=0.01):
            await asyncio.sleep(0.1)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(ValueError, match="no such metric"):
        runner.run(main())


def test_nothing_is_left_behind_when_the_block_ends() -> None:
    async def main() -> int:
        for _ in range(3):
            async with watch_event_loop(lambda lag: None):
                await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1


def test_on_a_real_loop_a_stall_is_seen() -> None:
    async def main() -> list[float]:
        lags: list[float] = []
        async with watch_event_loop(lags.append, interval=0.01):
            await asyncio.sleep(0.02)
            time.sleep(0.1)
            await asyncio.sleep(0.02)
        return lags

    assert max(asyncio.run(main())) > 0.08
