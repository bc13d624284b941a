"""What each sequence was doing when, to scale in time: a row for each, a bar for each phase (a Gantt chart)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.engine.events import LogEntry
from vllm_teach.engine.phases import PHASES, read_story
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

# Prefill and decode have their colours in all lessons; a hatch tells the ways of waiting apart without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "queue": {"facecolor": style.colour("saved"), "edgecolor": style.PAPER},
    "prefill": {"facecolor": style.colour("prefill"), "edgecolor": style.PAPER},
    "decode": {"facecolor": style.colour("decode"), "edgecolor": style.PAPER},
    "preempted": {"facecolor": style.tint(style.colour("limit"), 0.25), "edgecolor": style.colour("limit")}
    | {"hatch": "////"},
    "swapped": {"facecolor": style.tint(style.colour("written"), 0.3), "edgecolor": style.colour("written")}
    | {"hatch": "...."},
}
_MEANS = {"queue": "queue", "preempted": "preempted (computed again)", "swapped": "swapped to the host"}


@dataclass(frozen=True)
class TimelineBar:
    """A phase of the sequence in row `row`: from `start` for `seconds`, counted from the first event.

    `cuts` are the moments inside where one chunk of a prompt ends and the next begins.
    """

    row: int
    phase: str
    start: float
    seconds: float
    cuts: tuple[float, ...] = ()


@dataclass(frozen=True)
class RequestTimeline:
    """The bars, the rows' labels from the top, and the seconds from the first event to the last."""

    rows: tuple[str, ...]
    bars: tuple[TimelineBar, ...]
    seconds: float


def request_timeline(log: Iterable[LogEntry], names: Mapping[int, str] | None = None) -> RequestTimeline:
    """Read the timeline from an engine's events, a row for each sequence, in order of arrival.

    Raises InvalidArgumentError for a log that tells of no sequence.
    """
    entries = list(log)
    story = read_story(entries)
    if not story.phases:
        raise InvalidArgumentError("log tells of no sequence: add a request to the engine first.")
    zero = entries[0].time
    begins: dict[int, float] = {}
    for phase in story.phases:
        begins[phase.seq_id] = min(phase.start, begins.get(phase.seq_id, phase.start))
    order = sorted(begins, key=lambda seq_id: (begins[seq_id], seq_id))
    chunks: dict[int, list[float]] = {}
    for chunk in story.chunks:
        if chunk.phase == "prefill":
            chunks.setdefault(chunk.seq_id, []).append(chunk.start)
    bars = []
    for phase in story.phases:
        # The first chunk begins a little after its phase: the plan is closed when all have been admitted.
        inside = [start for start in chunks.get(phase.seq_id, []) if phase.start <= start < phase.end]
        cuts = tuple(start - zero for start in inside[1:]) if phase.name == "prefill" else ()
        bars.append(TimelineBar(order.index(phase.seq_id), phase.name, phase.start - zero, phase.seconds, cuts))
    labels = tuple((names or {}).get(seq_id, f"sequence {seq_id}") for seq_id in order)
    return RequestTimeline(labels, tuple(bars), entries[-1].time - zero)


def draw_request_timeline(
    data: RequestTimeline, ax: Axes | None = None, *, title: str = "Who waits, who computes its prompt, who generates"
) -> Figure:
    """Draw the timeline in seconds (milliseconds below one); white lines cut a prompt into its chunks.

    Returns the figure; changes `ax` if it is given.
    """
    if ax is None:
        height = min(0.38, 5.0 / len(data.rows)) * len(data.rows)
        _, ax = plt.subplots(figsize=(8.4, height + 1.6))
    scale, unit = (1.0, "s") if data.seconds >= 1 else (1e3, "ms")
    for bar in data.bars:
        left, width = scale * bar.start, scale * bar.seconds
        ax.add_patch(Rectangle((left, bar.row - 0.38), width, 0.76, linewidth=0.6, **LOOKS[bar.phase]))
        for cut in bar.cuts:
            ax.plot([scale * cut] * 2, [bar.row - 0.38, bar.row + 0.38], color=style.PAPER, linewidth=1.2)
    ax.set(xlim=(0, scale * data.seconds), ylim=(len(data.rows) - 0.4, -0.6), xlabel=f"time ({unit})")
    every = -(-len(data.rows) // 24)  # more labels would run into one another
    ax.set_yticks(range(0, len(data.rows), every), data.rows[::every])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title(title, pad=26)
    present = [phase for phase in PHASES if any(bar.phase == phase for bar in data.bars)]
    patches = [Patch(label=_MEANS.get(phase, phase), **LOOKS[phase]) for phase in present]
    ax.legend(handles=patches, loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=5, borderaxespad=0.2)
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure
