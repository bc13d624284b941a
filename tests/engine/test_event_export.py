"""The event log as phases, rows and a trace: by hand, and replayed against the scheduler that wrote it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from vllm_teach.engine.event_export import chrome_trace, sequence_rows, write_chrome_trace
from vllm_teach.engine.events import (
    Admitted,
    Arrived,
    BroughtBack,
    EventLog,
    Finished,
    FirstToken,
    Forked,
    Preempted,
    Scheduled,
    StepEnded,
)
from vllm_teach.engine.phases import PHASES, read_story
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError

ENDED = StepEnded(0, 0, 20, 1, 0, 0)


def log_of(*entries: tuple[int, float, object]) -> EventLog:
    """A log of (step, time, event)."""
    times = iter([time for _, time, _ in entries])
    log = EventLog(clock=lambda: next(times))
    for step, _, event in entries:
        log.step = step
        log.record(event)
    return log


# Prompt of 6 in chunks of 4 and 2, one decode, preempted with 7 computed, computed again as 4 + 4, one decode.
RECOMPUTED = (
    (0, 1.0, Arrived(7, 6)),
    (1, 2.0, Admitted(7, 0)),
    (1, 2.0, Scheduled(7, 0, 4)),
    (1, 3.0, ENDED),
    (2, 3.5, Scheduled(7, 4, 2)),
    (2, 4.0, FirstToken(7)),
    (2, 4.25, ENDED),
    (3, 5.0, Scheduled(7, 6, 1)),
    (3, 6.0, ENDED),
    (4, 7.0, Preempted(7, "recompute", 7, "recompute")),
    (5, 9.0, Admitted(7, 0, resumed=True)),
    (5, 9.0, Scheduled(7, 0, 4)),
    (5, 10.0, ENDED),
    (6, 10.5, Scheduled(7, 4, 4)),
    (6, 11.0, ENDED),
    (7, 11.5, Scheduled(7, 8, 1)),
    (7, 12.0, Finished(7, "length")),
    (7, 12.5, ENDED),
)


def phases_of(log: EventLog, seq_id: int) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.start, phase.end) for phase in read_story(log).of(seq_id)]


def test_a_recomputed_sequence_prefills_twice() -> None:
    assert phases_of(log_of(*RECOMPUTED), 7) == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 4.0),
        ("decode", 4.0, 7.0),
        ("preempted", 7.0, 9.0),
        ("prefill", 9.0, 11.0),
        ("decode", 11.0, 12.0),
    ]


def test_chunks_lie_within_phase_and_step() -> None:
    chunks = read_story(log_of(*RECOMPUTED)).chunks
    assert [(each.start_token, each.num_tokens, each.phase, each.start, each.end) for each in chunks] == [
        (0, 4, "prefill", 2.0, 3.0),
        (4, 2, "prefill", 3.5, 4.0),  # the first token came before the step's end
        (6, 1, "decode", 5.0, 6.0),
        (0, 4, "prefill", 9.0, 10.0),
        (4, 4, "prefill", 10.5, 11.0),
        (8, 1, "decode", 11.5, 12.0),
    ]


def test_a_step_that_breaks_off_while_a_sequence_is_recomputed_does_not_count() -> None:
    broken = list(RECOMPUTED)
    broken[13:13] = [(6, 10.2, Scheduled(7, 4, 4))]  # no end: the same step is planned again under the next number
    broken = [(step + (index > 13), time, event) for index, (step, time, event) in enumerate(broken)]
    story = read_story(log_of(*broken))
    assert phases_of(log_of(*broken), 7) == phases_of(log_of(*RECOMPUTED), 7)
    assert len(story.chunks) == len(story.steps) == 6


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    log = log_of(
        (1, 1.0, Admitted(1, 0)),
        (1, 1.0, Scheduled(1, 0, 4)),
        (1, 2.0, ENDED),
        (2, 3.0, Preempted(1, "swap", 4, "swap")),
        (3, 4.0, BroughtBack(1)),
        (3, 4.0, Scheduled(1, 4, 4)),
        (3, 5.0, FirstToken(1)),
        (3, 5.0, ENDED),
        (4, 6.0, Preempted(1, "swap", 8, "swap")),
        (5, 7.0, BroughtBack(1)),
        (5, 8.0, Scheduled(1, 8, 1)),
    )
    assert [name for name, *_ in phases_of(log, 1)] == [
        "prefill", "swapped", "prefill", "decode", "swapped", "decode",
    ]  # fmt: skip


def test_forks_decode_at_once_or_wait() -> None:
    log = log_of(
        (0, 0.0, Arrived(1, 4, num_forks=2)),
        (1, 1.0, Admitted(1, 0)),
        (1, 1.0, Scheduled(1, 0, 4)),
        (1, 2.0, Forked(1, 2)),
        (1, 2.0, FirstToken(2)),
        (1, 2.0, Forked(1, 3, queued=True)),
        (1, 2.0, FirstToken(3)),
        (1, 2.5, FirstToken(1)),
        (1, 3.0, ENDED),
        (2, 4.0, Admitted(3, 0, resumed=True)),
        (2, 4.0, Scheduled(3, 0, 5)),
        (2, 5.0, ENDED),
        (3, 6.0, Finished(3, "abort")),
        (3, 6.0, Finished(9, "abort")),  # a fork that never branched off
    )
    assert phases_of(log, 2) == [("decode", 2.0, 6.0)]  # open at the end
    assert phases_of(log, 3) == [("queue", 2.0, 4.0), ("prefill", 4.0, 5.0), ("decode", 5.0, 6.0)]
    assert phases_of(log, 9) == []
    assert read_story(log).reasons == {3: "abort", 9: "abort"}


def test_a_log_that_lost_its_beginning_starts_in_the_middle() -> None:
    log = log_of((8, 1.0, Scheduled(1, 0, 5)), (8, 1.0, Scheduled(2, 30, 1)), (8, 2.0, FirstToken(1)), (8, 2.0, ENDED))
    assert phases_of(log, 1) == [("prefill", 1.0, 2.0), ("decode", 2.0, 2.0)]
    assert phases_of(log, 2) == [("decode", 1.0, 2.0)]


def test_rows_are_flat_and_complete() -> None:
    log = log_of(*RECOMPUTED)
    assert log.rows()[2] == {"step": 1, "time": 2.0, "event": "Scheduled", "seq_id": 7, "start": 0, "num_tokens": 4}
    assert len(log.rows()) == len(RECOMPUTED)


def test_a_sequences_row_adds_its_phases_up() -> None:
    assert sequence_rows(log_of(*RECOMPUTED)) == [
        {
            "seq_id": 7,
            "arrival": 1.0,
            "time_to_first_token": 3.0,
            "queue_seconds": 1.0,
            "prefill_seconds": 4.0,
            "decode_seconds": 4.0,
            "preempted_seconds": 2.0,
            "swapped_seconds": 0,
            "num_steps": 6,
            "num_tokens": 16,
            "num_preemptions": 1,
            "finish_reason": "length",
        }
    ]


def check_schema(trace: dict[str, Any]) -> None:
    """What the Trace Event Format asks of each kind of event, and that bars of one track nest."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert list(event["args"]) == ["name"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(tracks)
    for bars in tracks.values():
        for start, end in bars:
            for other_start, other_end in bars:
                apart = end <= other_start + 0.002 or other_end <= start + 0.002
                inside = start >= other_start - 0.002 and end <= other_end + 0.002
                around = other_start >= start - 0.002 and other_end <= end + 0.002
                assert apart or inside or around


def test_the_trace_by_hand() -> None:
    trace = chrome_trace(log_of(*RECOMPUTED))
    check_schema(trace)
    events = trace["traceEvents"]
    bars = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert bars[:2] == [("queue", 0, 1e6), ("prefill", 1e6, 2e6)]
    assert ("2 tokens", 2.5e6, 0.5e6) in bars
    assert [e["ts"] for e in events if e["name"] == "sequences"] == [2e6, 3.25e6, 5e6, 9e6, 10e6, 11.5e6]
    assert next(e["args"] for e in events if e["name"] == "step 1")["token_budget"] == 20


def test_an_empty_log_is_an_empty_trace() -> None:
    trace = chrome_trace(EventLog())
    assert [e["ph"] for e in trace["traceEvents"]] == ["M", "M", "M"]


def test_the_file_is_json_of_the_trace(tmp_path) -> None:
    log = log_of(*RECOMPUTED)
    file = write_chrome_trace(log, tmp_path / "trace.json")
    assert json.loads(file.read_text()) == chrome_trace(log)
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        write_chrome_trace(log, tmp_path / "no-folder" / "trace.json")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_real_run_replayed(make_scheduler: Callable, make_sequence: Callable, run_step: Callable, preemption) -> None:
    """The phases say at each step's end who runs, waits and is swapped, as the scheduler's own queues do."""
    scheduler = make_scheduler(blocks=10, host_blocks=12, preemption=preemption)
    sequences = [make_sequence(prompt=range(5 + 3 * i), max_tokens=9, n=1 + i % 2) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    queues: dict[int, tuple[set[int], set[int], set[int]]] = {}
    computed: dict[int, int] = {}
    while scheduler.has_unfinished():
        for sequence, _, count in run_step(scheduler):
            computed[sequence.seq_id] = computed.get(sequence.seq_id, 0) + count
        ids = [{each.seq_id for each in queue} for queue in (scheduler.running, scheduler.waiting, scheduler.swapped)]
        queues[scheduler.events.step] = (ids[0], ids[1], ids[2])
    story = read_story(scheduler.events)
    assert set(story.reasons.values()) == {"length"}
    for step in story.steps:
        running, waiting, swapped = queues[step.step]
        now = {p.seq_id: p.name for p in story.phases if p.start <= step.end < p.end}
        assert {seq for seq, name in now.items() if name in ("prefill", "decode")} == running
        assert {seq for seq, name in now.items() if name in ("queue", "preempted")} == waiting
        assert {seq for seq, name in now.items() if name == "swapped"} == swapped
    assert any(phase.name == ("swapped" if preemption == "swap" else "preempted") for phase in story.phases)
    assert {row["seq_id"]: row["num_tokens"] for row in sequence_rows(scheduler.events) if row["num_steps"]} == computed
    check_schema(chrome_trace(scheduler.events))


def test_times_of_an_engine_are_those_of_its_requests(make_llm: Callable) -> None:
    llm = make_llm(blocks=20, max_num_seqs=3, max_num_batched_tokens=8)
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(5)]
    outputs = llm.generate([list(range(1, 8 + 3 * i)) for i in range(5)], params, use_tqdm=False)
    events = llm.engine.events
    table = sequence_rows(events)
    assert [row["seq_id"] for row in table] == [0, 1, 2, 3, 4]
    for output, row in zip(outputs, table, strict=True):
        times = output.metrics
        whole = sum(row[f"{name}_seconds"] for name in PHASES)
        assert times.arrival_time <= row["arrival"] <= times.first_scheduled_time  # one clock
        assert times.first_scheduled_time < row["arrival"] + row["time_to_first_token"] <= times.first_token_time
        assert times.token_times[-2] < row["arrival"] + whole <= times.finished_time
    check_schema(chrome_trace(events))
    steps = [e for e in chrome_trace(events)["traceEvents"] if e["name"].startswith("step ")]
    assert len(steps) == events.step
    computed = sum(e["args"]["prefill_tokens"] + e["args"]["decode_tokens"] for e in steps)
    assert computed == sum(row["num_tokens"] for row in table)
