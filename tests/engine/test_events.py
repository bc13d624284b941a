import pytest

from vllm_teach.engine.events import (
    Admitted,
    Arrived,
    EventLog,
    Finished,
    FirstToken,
    Forked,
    LogEntry,
    Scheduled,
    StepEnded,
)
from vllm_teach.errors import InvalidArgumentError


def test_every_decision_is_recorded_with_its_step_and_time(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    parent = make_sequence(prompt=range(6), n=2, max_tokens=2)
    a, b = parent.seq_id, parent.forks[0].seq_id
    scheduler.add(parent)
    while scheduler.has_unfinished():
        run_step(scheduler)
    own = [entry for entry in scheduler.events if type(entry.event).__module__ == "vllm_teach.engine.events"]
    assert [(entry.step, entry.event) for entry in own] == [
        (0, Arrived(a, 6, 1)),
        (1, Admitted(a, 0)),
        (1, Scheduled(a, 0, 4)),
        (1, StepEnded(4, 0, 4, 1, 0, 0)),
        (2, Scheduled(a, 4, 2)),
        (2, Forked(a, b)),
        (2, FirstToken(b)),
        (2, FirstToken(a)),
        (2, StepEnded(2, 0, 4, 2, 0, 0)),
        (3, Scheduled(a, 6, 1)),
        (3, Scheduled(b, 6, 1)),
        (3, Finished(a, "length")),
        (3, Finished(b, "length")),
        (3, StepEnded(0, 2, 4, 0, 0, 0)),
    ]
    times = [entry.time for entry in scheduler.events]
    assert times == [float(number) for number in range(len(times))]  # the fixture's clock


def test_the_caches_events_are_in_the_same_log(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(prefix_cache="hash")
    for _ in range(2):
        scheduler.add(make_sequence(prompt=range(9), max_tokens=1))
        run_step(scheduler)
    names = [(entry.step, type(entry.event).__name__) for entry in scheduler.events]
    assert (1, "Allocated") in names
    assert (1, "Freed") in names
    assert (2, "PrefixHit") in names


def test_a_bounded_log_keeps_the_newest() -> None:
    log = EventLog(clock=lambda: 1.5, max_events=2)
    for number in range(5):
        log.step = number
        log.record(FirstToken(number))
    assert list(log) == [LogEntry(3, 1.5, FirstToken(3)), LogEntry(4, 1.5, FirstToken(4))]
    assert (len(log), log.num_recorded) == (2, 5)
    log.clear()
    assert (len(log), log.num_recorded) == (0, 5)
    with pytest.raises(InvalidArgumentError, match="max_events=0"):
        EventLog(max_events=0)


def test_rows_are_ready_for_a_dataframe() -> None:
    log = EventLog(clock=lambda: 2.0)
    log.record(Scheduled(7, 0, 16))
    log.record(Finished(7, "stop"))
    assert log.rows() == [
        {"step": 0, "time": 2.0, "event": "Scheduled", "seq_id": 7, "start": 0, "num_tokens": 16},
        {"step": 0, "time": 2.0, "event": "Finished", "seq_id": 7, "reason": "stop"},
    ]
