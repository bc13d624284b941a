"""An event log for other tools: a row for each sequence, and a trace for ui.perfetto.dev or chrome://tracing.

The trace is in the Trace Event Format (Google, "Trace Event Format", 2016), which both viewers read: complete events
(ph "X") with start and duration in microseconds, counters ("C") and names of tracks ("M").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_teach.engine.block_history import BlocksCounted, count_blocks
from vllm_teach.engine.events import LogEntry
from vllm_teach.engine.phases import PHASES, Chunk, Phase, StepSpan, Story, read_story
from vllm_teach.errors import InvalidArgumentError

# The viewer's "processes": groups of tracks.
ENGINE, SEQUENCES = 1, 2
# Names of the viewers' own palette, so that a phase has the same colour in each row.
_COLOURS = {
    "queue": "grey",
    "prefill": "thread_state_runnable",
    "decode": "thread_state_running",
    "preempted": "terrible",
    "swapped": "bad",
}


def sequence_rows(log: Iterable[LogEntry]) -> list[dict[str, Any]]:
    """Return one dict per sequence, by id: seconds in each phase, steps, tokens computed, preemptions, finish reason.

    `time_to_first_token` is the seconds in queue and prefill together, or None for a fork, whose parent computed it.
    `finish_reason` is None for what still runs at the end of the log.
    """
    story = read_story(log)
    return [_sequence_row(story, seq_id) for seq_id in sorted({phase.seq_id for phase in story.phases})]


def chrome_trace(log: Iterable[LogEntry]) -> dict[str, Any]:
    """Return the log as what `json.dump` takes and the viewers open. Times count from the first event.

    The group "engine" has a bar for each step and counters of sequences (running, waiting, swapped), of tokens a step
    (prefill, decode) and of KV blocks held (of one sequence alone, shared); the group "sequences" a row for each
    sequence with a bar for each phase, and inside of it a bar for each prompt chunk.
    """
    entries = list(log)
    story = read_story(entries)
    zero = entries[0].time if entries else 0.0
    events = _names(story)
    for step in story.steps:
        events += [_step(step, zero), *_counters(step, zero)]
    events += [_blocks(counted, zero) for counted in count_blocks(entries)]
    events += [_phase(phase, zero, story) for phase in story.phases]
    events += [_chunk(chunk, zero) for chunk in story.chunks if chunk.phase == "prefill"]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(log: Iterable[LogEntry], path: str | Path) -> Path:
    """Write `chrome_trace(log)` to the file `path` and return it. Raises InvalidArgumentError where none can be."""
    file = Path(path)
    try:
        file.write_text(json.dumps(chrome_trace(log)), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"path={str(path)!r} cannot be written ({error}): give another file.") from error
    return file


def _sequence_row(story: Story, seq_id: int) -> dict[str, Any]:
    mine = story.of(seq_id)
    chunks = [chunk for chunk in story.chunks if chunk.seq_id == seq_id]
    first = next((phase.start for phase in mine if phase.name == "decode"), None)
    came_whole = mine[0].name in ("queue", "prefill") and any(phase.name == "prefill" for phase in mine)
    return {
        "seq_id": seq_id,
        "arrival": mine[0].start,
        "time_to_first_token": first - mine[0].start if first is not None and came_whole else None,
        **{f"{name}_seconds": story.seconds(seq_id, name) for name in PHASES},
        "num_steps": len(chunks),
        "num_tokens": sum(chunk.num_tokens for chunk in chunks),
        "num_preemptions": sum(phase.name in ("preempted", "swapped") for phase in mine),
        "finish_reason": story.reasons.get(seq_id),
    }


def _microseconds(seconds: float) -> float:
    """Seconds as the format wants them, to the nanosecond."""
    return round(seconds * 1e6, 3)


def _names(story: Story) -> list[dict[str, Any]]:
    named: list[tuple[str, int, int, str]] = [
        ("process_name", ENGINE, 0, "engine"),
        ("process_name", SEQUENCES, 0, "sequences"),
        ("thread_name", ENGINE, 0, "steps"),
    ]
    for seq_id in sorted({phase.seq_id for phase in story.phases}):
        named.append(("thread_name", SEQUENCES, seq_id, f"sequence {seq_id}"))
    return [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        for kind, pid, tid, name in named
    ]


def _bar(name: str, pid: int, tid: int, span: Phase | Chunk | StepSpan, zero: float, **args: object) -> dict[str, Any]:
    start, end = _microseconds(span.start - zero), _microseconds(span.end - zero)
    times = {"ts": start, "dur": round(end - start, 3)}
    return (
        {"ph": "X", "name": name, "cat": "step" if pid == ENGINE else "phase", "pid": pid, "tid": tid}
        | times
        | {"args": args}
    )


def _step(step: StepSpan, zero: float) -> dict[str, Any]:
    ended = step.ended
    return _bar(
        f"step {step.step}",
        ENGINE,
        0,
        step,
        zero,
        prefill_tokens=ended.num_prefill_tokens,
        decode_tokens=ended.num_decode_tokens,
        token_budget=ended.token_budget,
    )


def _counters(step: StepSpan, zero: float) -> list[dict[str, Any]]:
    ended, ts = step.ended, _microseconds(step.end - zero)
    values = {
        "sequences": {"running": ended.num_running, "waiting": ended.num_waiting, "swapped": ended.num_swapped},
        "tokens in the step": {"prefill": ended.num_prefill_tokens, "decode": ended.num_decode_tokens},
    }
    return [_counter(name, ts, args) for name, args in values.items()]


def _blocks(counted: BlocksCounted, zero: float) -> dict[str, Any]:
    args = {"own": counted.own, "shared": counted.shared}
    return _counter("KV blocks", _microseconds(counted.time - zero), args)


def _counter(name: str, ts: float, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": ts, "args": args}


def _phase(phase: Phase, zero: float, story: Story) -> dict[str, Any]:
    bar = _bar(phase.name, SEQUENCES, phase.seq_id, phase, zero, finish_reason=story.reasons.get(phase.seq_id))
    return bar | {"cname": _COLOURS[phase.name]}


def _chunk(chunk: Chunk, zero: float) -> dict[str, Any]:
    name = f"{chunk.num_tokens} tokens"
    return _bar(name, SEQUENCES, chunk.seq_id, chunk, zero, step=chunk.step, first_position=chunk.start_token)
