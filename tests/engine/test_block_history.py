"""Who held which block, read from events, against the block tables themselves."""

from collections.abc import Callable

import pytest

from vllm_teach.engine.block_history import BlocksCounted, BlocksHeld, block_history, count_blocks
from vllm_teach.engine.event_export import chrome_trace
from vllm_teach.engine.events import EventLog, Scheduled, StepEnded
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.request import SampledToken
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.events import Allocated, Freed, Moved, Shared

ENDED = StepEnded(0, 0, 20, 1, 0, 0)


def test_by_hand() -> None:
    log = EventLog(clock=iter(range(20)).__next__)
    log.step = 3
    for event in (
        Freed(9, (5,)),  # taken before the log begins
        Allocated(1, (0, 1)),
        Shared(2, (0,)),
        Moved(((0, 1), (1, 2))),
        Scheduled(1, 0, 8),
        Scheduled(2, 4, 1),
        Freed(1, (1, 2)),
        ENDED,
    ):
        log.record(event)
    assert block_history(log) == [
        BlocksHeld(3, 4, True, {1: (1, 2), 2: (1,)}),
        BlocksHeld(3, 7, False, {1: (2,)}),
    ]
    assert [held.num_shared for held in block_history(log)] == [1, 0]
    assert list(count_blocks(log)) == [BlocksCounted(4, 1, 1), BlocksCounted(7, 1, 0)]
    counters = [e["args"] for e in chrome_trace(log)["traceEvents"] if e["name"] == "KV blocks"]
    assert counters == [{"own": 1, "shared": 1}, {"own": 1, "shared": 0}]


def test_blocks_are_counted_where_the_log_lost_its_beginning() -> None:
    log = EventLog(clock=iter(range(20)).__next__)
    log.step = 1
    for event in (Shared(2, (5,)), Freed(9, (5,)), Shared(3, (5,)), Moved(((5, 4), (7, 5))), ENDED):
        log.record(event)
    assert list(count_blocks(log)) == [BlocksCounted(4, 0, 1)]


@pytest.mark.parametrize("prefix_cache", [None, "hash", "radix"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_it_equals_the_tables_in_every_step(
    make_scheduler: Callable, make_sequence: Callable, prefix_cache: str | None, preemption: str
) -> None:
    scheduler = make_scheduler(blocks=12, host_blocks=16, prefix_cache=prefix_cache, preemption=preemption)
    for i in range(8):
        scheduler.add(make_sequence(prompt=range(5 + 2 * i), max_tokens=9, n=1 + i % 2))
    tables: list[dict[int, tuple[int, ...]]] = []

    def look() -> None:
        holders: dict[int, list[int]] = {}
        for seq_id in range(20):
            if scheduler.kv.has(seq_id):
                for block in scheduler.kv.table(seq_id).blocks:
                    if block != NO_BLOCK:
                        holders.setdefault(block, []).append(seq_id)
        tables.append({block: tuple(sorted(holders[block])) for block in sorted(holders)})

    token = 100
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        look()
        drawn = [each for item in plan.items if item.samples for each in (item.sequence, *item.sequence.forks)]
        token += 1
        scheduler.update(plan, StepResult({each.seq_id: SampledToken(token + each.seq_id % 3) for each in drawn}))
        look()
    history = block_history(scheduler.events)
    assert [held.holders for held in history] == tables
    counted = [(each.time, each.own + each.shared, each.shared) for each in count_blocks(scheduler.events)]
    assert counted == [(held.time, len(held.holders), held.num_shared) for held in history]
    assert tables[-1] == {}
    assert any(held.num_shared for held in history)
