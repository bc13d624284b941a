import asyncio
import subprocess
import sys
import threading

import pytest

from vllm_teach import counters
from vllm_teach.errors import InvalidArgumentError


def totals(work: counters.Work) -> tuple[int, int, int, int]:
    return work.flops, work.bytes_read, work.bytes_written, work.bytes_moved


def test_reports_add_up_in_total_and_by_name():
    with counters.count() as tally:
        counters.report("a", flops=1, bytes_read=10, bytes_written=100)
        counters.report("b", flops=2, bytes_read=20)
        counters.report("a", bytes_written=5)
    assert totals(tally) == (3, 30, 105, 135)
    assert totals(tally.by_name["a"]) == (1, 10, 105, 115)
    assert totals(tally.by_name["b"]) == (2, 20, 0, 20)
    assert list(tally.by_name) == ["a", "b"]


def test_outside_a_context_nothing_is_counted():
    counters.report("a", flops=1)
    with counters.count() as tally:
        pass
    counters.report("a", flops=1)
    assert totals(tally) == (0, 0, 0, 0)


def test_nested_contexts_both_count():
    with counters.count() as outer:
        counters.report("a", flops=1)
        with counters.count() as inner:
            counters.report("a", flops=10)
        counters.report("a", flops=100)
    assert (outer.flops, inner.flops) == (111, 10)


def test_a_context_ends_with_its_block_also_when_the_block_raises():
    def fail() -> None:
        counters.report("a", flops=1)
        raise KeyError("stop")

    with counters.count() as outer:
        with pytest.raises(KeyError), counters.count() as inner:
            fail()
        counters.report("a", flops=10)
    assert (outer.flops, inner.flops) == (11, 1)


def test_a_spill_is_charged_by_each_contexts_own_fast_memory():
    with counters.count(fast_memory_bytes=1000) as large, counters.count(fast_memory_bytes=999) as small:
        counters.report("a", bytes_read=7, bytes_written=3, working_set_bytes=1000, spill_bytes=50)
    assert totals(large) == (0, 7, 3, 10)
    assert totals(small) == totals(small.by_name["a"]) == (0, 57, 53, 110)
    assert (large.fast_memory_bytes, small.fast_memory_bytes) == (1000, 999)


def test_intensity_is_flops_per_byte():
    work = counters.Work(flops=100, bytes_read=15, bytes_written=10)
    assert work.intensity == 4
    assert counters.Work().intensity == float("inf")


def test_another_thread_does_not_see_the_context():
    with counters.count() as tally:
        thread = threading.Thread(target=lambda: counters.report("a", flops=1))
        thread.start()
        thread.join()
    assert tally.flops == 0


def test_what_is_started_inside_the_block_is_counted():
    async def work(flops: int) -> None:
        counters.report("a", flops=flops)

    async def main() -> int:
        elsewhere = asyncio.create_task(work(100))  # its context is the one it was created in
        with counters.count() as tally:
            await elsewhere
            inside = asyncio.create_task(work(1))
            await asyncio.to_thread(counters.report, "a", flops=10)
        await inside
        late = asyncio.create_task(work(1000))
        await late
        return tally.flops

    assert asyncio.run(main()) == 11


def test_a_task_that_outlives_the_block_is_still_counted():
    async def work() -> None:
        counters.report("a", flops=1)

    async def main() -> tuple[int, int]:
        with counters.count() as tally:
            inside = asyncio.create_task(work())
        before = tally.flops
        await inside
        return before, tally.flops

    assert asyncio.run(main()) == (0, 1)


def test_charging_a_step_many_times_is_reporting_it_as_often():
    step = {"flops": 2, "bytes_read": 3, "bytes_written": 5, "working_set_bytes": 100, "spill_bytes": 7}
    for fast_memory in (99, 100):
        with counters.count(fast_memory) as reported:
            for _ in range(3):
                counters.report("a", **step)
        charged = counters.Tally(fast_memory_bytes=fast_memory)
        charged.charge("a", step, times=3)
        assert charged == reported
    assert totals(charged) == (6, 9, 15, 24)


def test_concurrent_tasks_count_apart():
    async def work(flops: int) -> int:
        with counters.count() as tally:
            for _ in range(3):
                counters.report("a", flops=flops)
                await asyncio.sleep(0)
        return tally.flops

    async def both() -> list[int]:
        return await asyncio.gather(work(1), work(100))

    assert asyncio.run(both()) == [3, 300]


@pytest.mark.parametrize("argument", ["flops", "bytes_read", "bytes_written", "working_set_bytes", "spill_bytes"])
def test_a_negative_amount_is_refused(argument):
    with pytest.raises(InvalidArgumentError, match=f"{argument} of 'a' is -1"):
        counters.report("a", **{argument: -1})


@pytest.mark.parametrize("size", [0, -1])
def test_a_fast_memory_that_is_not_positive_is_refused(size):
    with pytest.raises(InvalidArgumentError, match=f"fast_memory_bytes is {size}"), counters.count(size):
        pass


def test_counters_and_traffic_load_no_torch():
    code = (
        "import sys, vllm_teach.counters, vllm_teach.attention.traffic, vllm_teach.backends\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", ["x", None, float("nan"), 0.5, True])
def test_a_fast_memory_that_is_no_whole_number_is_refused(size):
    with pytest.raises(InvalidArgumentError, match="fast_memory_bytes is"), counters.count(size):
        pass


@pytest.mark.parametrize("amount", ["a", None, float("nan"), 1.5, True])
@pytest.mark.parametrize("argument", ["flops", "bytes_read", "bytes_written", "working_set_bytes", "spill_bytes"])
def test_an_amount_that_is_no_whole_number_is_refused_and_not_counted(argument, amount):
    with counters.count() as tally:
        with pytest.raises(InvalidArgumentError, match=f"{argument} of 'x' is {amount!r}; report whole numbers"):
            counters.report("x", **{argument: amount})
        assert tally == counters.Tally()
