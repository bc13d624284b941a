"""What each sequence was doing when: the event log, read as stretches of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_teach.engine.events import (
    Admitted,
    Arrived,
    BroughtBack,
    Finished,
    FirstToken,
    Forked,
    LogEntry,
    Preempted,
    Scheduled,
    StepEnded,
)

PhaseName = Literal["queue", "prefill", "decode", "preempted", "swapped"]
PHASES: tuple[PhaseName, ...] = ("queue", "prefill", "decode", "preempted", "swapped")


@dataclass(frozen=True)
class Phase:
    """A sequence was in phase `name` from `start` to `end`, in seconds of the log's clock.

    "queue": not yet admitted. "prefill": its prompt is computed, or after a preemption everything anew. "decode": one
    token a step. "preempted": it lost its blocks and waits to be computed again. "swapped": its blocks are on the host.
    """

    seq_id: int
    name: PhaseName
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Chunk:
    """A step computed `num_tokens` tokens of a sequence from position `start_token` on, from `start` to `end`."""

    seq_id: int
    step: int
    start_token: int
    num_tokens: int
    phase: PhaseName
    start: float
    end: float


@dataclass(frozen=True)
class StepSpan:
    """One step that was computed: when, and what it ended with."""

    step: int
    start: float
    end: float
    ended: StepEnded


@dataclass(frozen=True)
class Story:
    """An event log as stretches of time: of sequences, of their parts in steps, and of the steps themselves.

    `reasons` has the finish reason of each sequence that ended. What is open at the end of the log ends there.
    """

    phases: tuple[Phase, ...]
    chunks: tuple[Chunk, ...]
    steps: tuple[StepSpan, ...]
    reasons: dict[int, str]

    def of(self, seq_id: int) -> list[Phase]:
        """Return the phases of one sequence, in order."""
        return [phase for phase in self.phases if phase.seq_id == seq_id]

    def seconds(self, seq_id: int, name: PhaseName) -> float:
        """Return how long one sequence was in phase `name`, in all."""
        return sum(phase.seconds for phase in self.of(seq_id) if phase.name == name)


@dataclass
class _Track:
    """One sequence while the log is read. `reached`: how many of its tokens were computed at the most.

    `planned`: how many will be when the step is done; a step that breaks off is planned again.
    """

    phase: PhaseName
    since: float
    before: PhaseName = "prefill"  # the phase that a swap interrupted
    reached: int = 0
    planned: int = 0
    decoding: bool = False  # it has drawn a token
    caught_up: bool = False  # this step computes the last of what a preemption lost


def read_story(log: Iterable[LogEntry]) -> Story:
    """Read the entries of an EventLog, oldest first. A log that lost its oldest events begins in the middle of things.

    The events of the cache (`vllm_teach.kvcache.events`) are passed over: see `event_export` and the figures.
    """
    reader = _Reader()
    for entry in log:
        reader.read(entry)
    return reader.story()


class _Reader:
    def __init__(self) -> None:
        self.tracks: dict[int, _Track] = {}
        self.phases: list[Phase] = []
        self.chunks: list[Chunk] = []
        self.steps: list[StepSpan] = []
        self.reasons: dict[int, str] = {}
        self.turns: dict[int, float] = {}  # when the last phase of a sequence ended
        self.open: list[tuple[Scheduled, PhaseName, float]] = []  # of the step that is being computed
        self.step, self.step_start, self.now = 0, 0.0, 0.0

    def read(self, entry: LogEntry) -> None:
        """Take in one event."""
        self.now = entry.time
        if entry.step != self.step:  # `schedule` counts the step before anything else happens in it
            self.step, self.step_start, self.open = entry.step, entry.time, []
        match entry.event:
            case Arrived(seq_id):
                self.enter(seq_id, "queue")
            case Admitted(seq_id):
                self.enter(seq_id, "prefill")
            case Scheduled():
                self.schedule(entry.event)
            case FirstToken(seq_id):
                self.first_token(seq_id)
            case Forked():
                self.fork(entry.event)
            case Preempted(seq_id, mode):
                track = self.tracks.get(seq_id)
                before = track.phase if track else "decode"
                self.enter(seq_id, "swapped" if mode == "swap" else "preempted").before = before
            case BroughtBack(seq_id):
                track = self.tracks.get(seq_id)
                self.enter(seq_id, track.before if track else "decode")
            case Finished(seq_id, reason):
                self.leave(seq_id)
                self.reasons[seq_id] = reason
            case StepEnded():
                self.end_step(entry.event)

    def enter(self, seq_id: int, phase: PhaseName) -> _Track:
        """End the phase that a sequence is in, if any, and begin `phase`."""
        track = self.tracks.get(seq_id)
        if track is None:
            track = self.tracks[seq_id] = _Track(phase, self.now)
        else:
            self.end_phase(seq_id, track)
            track.phase, track.since = phase, self.now
        return track

    def leave(self, seq_id: int) -> None:
        """End the phase that a sequence is in; a fork that never branched off has none."""
        track = self.tracks.pop(seq_id, None)
        if track is not None:
            self.end_phase(seq_id, track)

    def end_phase(self, seq_id: int, track: _Track) -> None:
        self.phases.append(Phase(seq_id, track.phase, track.since, self.now))
        self.turns[seq_id] = self.now

    def schedule(self, event: Scheduled) -> None:
        track = self.tracks.get(event.seq_id)
        if track is None:  # the log lost its beginning
            track = self.enter(event.seq_id, "prefill" if event.num_tokens > 1 else "decode")
        end = event.start + event.num_tokens
        track.caught_up = track.decoding and end > track.reached
        track.planned = end
        self.open.append((event, track.phase, self.now))

    def fork(self, event: Forked) -> None:
        """A fork's first token was drawn in its parent's step, whether it finds a place or not."""
        parent = self.tracks.get(event.parent_id)
        child = self.enter(event.child_id, "queue" if event.queued else "decode")
        child.decoding, child.reached = True, parent.planned if parent else 0

    def first_token(self, seq_id: int) -> None:
        track = self.tracks.get(seq_id)
        if track is not None:
            if track.phase == "prefill":
                self.enter(seq_id, "decode")
            track.decoding = True

    def end_step(self, event: StepEnded) -> None:
        for scheduled, phase, start in self.open:
            seq_id, track = scheduled.seq_id, self.tracks.get(scheduled.seq_id)
            turn = self.turns.get(seq_id, start)
            end = turn if turn > start else self.now  # a chunk lies within its phase
            self.chunks.append(Chunk(seq_id, self.step, scheduled.start, scheduled.num_tokens, phase, start, end))
            if track is not None:
                track.reached = max(track.reached, track.planned)
                if track.caught_up and track.phase == "prefill":
                    self.enter(seq_id, "decode")
        self.open = []
        self.steps.append(StepSpan(self.step, self.step_start, self.now, event))

    def story(self) -> Story:
        for seq_id in list(self.tracks):
            self.leave(seq_id)
        return Story(tuple(self.phases), tuple(self.chunks), tuple(self.steps), self.reasons)
