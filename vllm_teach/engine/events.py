"""What happened, in order: every decision of scheduler and cache, with its step and time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Arrived:
    """A sequence joined the queue; `num_forks` siblings branch off when its prompt is computed."""

    seq_id: int
    num_prompt_tokens: int
    num_forks: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence left the queue and runs; the cache had `num_cached_tokens` of its tokens.

    `resumed`: it ran before and was preempted (a fork that found no place counts as such).
    """

    seq_id: int
    num_cached_tokens: int
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence is in the step's plan with `num_tokens` tokens, the first of them at position `start`."""

    seq_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a sequence is there."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence with `num_computed` tokens in the cache lost its blocks, by `mode`: "recompute" or "swap".

    `wanted` is the mode that was asked for: "swap" beside the mode "recompute" means that the host had no room.
    """

    seq_id: int
    mode: str
    num_computed: int
    wanted: str


@dataclass(frozen=True, slots=True)
class BroughtBack:
    """A swapped sequence runs again."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Forked:
    """`child_id` branched off `parent_id`; with `queued` it found no place among the running and waits for one."""

    parent_id: int
    child_id: int
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended: "stop", "length", "abort" or "error"."""

    seq_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step was computed: its tokens by kind, the budget they came from, and who is where now."""

    num_prefill_tokens: int
    num_decode_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int
    num_swapped: int


class LogEntry(NamedTuple):
    """`event` happened in `step` (0: before the first) at `time`, in seconds of the log's clock."""

    step: int
    time: float
    event: Any


E = TypeVar("E")


class EventLog:
    """A list of events, oldest first. `clock` gives the time (a simulator has its own).

    With `max_events` only the newest so many are kept, so that a server's memory stays flat; `num_recorded` counts all.
    `step` is set by the scheduler. The cache's events (`vllm_teach.kvcache.events`) are recorded here too.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, max_events: int | None = None) -> None:
        if max_events is not None and max_events < 1:
            raise InvalidArgumentError(f"max_events={max_events} is not valid: keep at least one, or None for all.")
        self.clock = clock
        self.step = 0
        self.num_recorded = 0
        self.entries: deque[LogEntry] = deque(maxlen=max_events)

    def record(self, event: object) -> None:
        """Append `event` with the step and the time."""
        self.num_recorded += 1
        self.entries.append(LogEntry(self.step, self.clock(), event))

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of class `kind`, oldest first, without step and time."""
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per event, ready for a DataFrame: step, time, event (the class's name) and its fields."""
        return [
            {"step": entry.step, "time": entry.time, "event": type(entry.event).__name__}
            | {each.name: getattr(entry.event, each.name) for each in fields(entry.event)}
            for entry in self.entries
        ]

    def clear(self) -> None:
        """Forget the events; `num_recorded` and `step` go on."""
        self.entries.clear()

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
