"""Who has which place of the batch when, to scale in time: a row for each place, a box for each step it is used in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.engine.events import LogEntry
from vllm_teach.engine.phases import Story, read_story
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_EMPTY: dict[str, Any] = {"facecolor": style.PAPER, "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}


@dataclass(frozen=True)
class PlaceBox:
    """A sequence in place `place` computed `num_tokens` tokens of kind "prefill" or "decode" in a step."""

    place: int
    seq_id: int
    phase: str
    start: float
    end: float
    num_tokens: int


@dataclass(frozen=True)
class BatchPlaces:
    """The boxes, from the first event (time 0) to the last, and the stays: (place, seq_id, from, to)."""

    num_places: int
    seconds: float
    boxes: tuple[PlaceBox, ...]
    stays: tuple[tuple[int, int, float, float], ...]

    @property
    def busy(self) -> float:
        """The share of the places' time in which a step computed something for the sequence that has the place."""
        return sum(box.end - box.start for box in self.boxes) / (self.num_places * self.seconds)

    @property
    def empty(self) -> float:
        """The share of the places' time in which nobody had the place."""
        return 1 - sum(end - start for _, _, start, end in self.stays) / (self.num_places * self.seconds)


def batch_places(log: Iterable[LogEntry], num_places: int) -> BatchPlaces:
    """Give each sequence the lowest free place, from when it is admitted until it ends or is preempted.

    The engine has no places, only a number of sequences that may run; they are numbered here for the drawing. Raises
    InvalidArgumentError for a log without a step, and when more than `num_places` ran at once.
    """
    entries = list(log)
    story = read_story(entries)
    if not story.steps:
        raise InvalidArgumentError("log has no step that was computed: let the engine make one first.")
    zero, free_from, stays = entries[0].time, [float("-inf")] * num_places, []
    for seq_id, start, end in sorted(_runs(story), key=lambda run: (run[1], run[0])):
        place = next((place for place, free in enumerate(free_from) if free <= start), None)
        if place is None:
            raise InvalidArgumentError(f"num_places={num_places} is too few: more sequences ran at once.")
        free_from[place] = end
        stays.append((place, seq_id, start - zero, end - zero))
    boxes = []
    for chunk in story.chunks:
        middle = (chunk.start + chunk.end) / 2 - zero
        place = next(p for p, seq_id, start, end in stays if seq_id == chunk.seq_id and start <= middle <= end)
        phase = "decode" if chunk.phase == "decode" else "prefill"
        boxes.append(PlaceBox(place, chunk.seq_id, phase, chunk.start - zero, chunk.end - zero, chunk.num_tokens))
    return BatchPlaces(num_places, entries[-1].time - zero, tuple(boxes), tuple(stays))


def _runs(story: Story) -> list[tuple[int, float, float]]:
    """(seq_id, from, to) of each stretch in which a sequence ran: a prefill and the decode behind it are one."""
    runs: list[tuple[int, float, float]] = []
    last: dict[int, int] = {}
    for phase in sorted(story.phases, key=lambda phase: (phase.seq_id, phase.start, phase.end)):
        if phase.name not in ("prefill", "decode"):
            last.pop(phase.seq_id, None)
        elif phase.seq_id in last:
            seq_id, start, _ = runs[last[phase.seq_id]]
            runs[last[phase.seq_id]] = (seq_id, start, phase.end)
        else:
            last[phase.seq_id] = len(runs)
            runs.append((phase.seq_id, phase.start, phase.end))
    return runs


def draw_batch_places(
    panels: Mapping[str, BatchPlaces], names: Mapping[int, str], *, title: str, unit: str = "ms, modelled"
) -> Figure:
    """Draw one panel below the other on the same time axis; a letter from `names` where a sequence takes its place."""
    rows = sum(data.num_places for data in panels.values())
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8.4, 0.27 * rows + 0.42 * len(panels) + 1.1), sharex=True, squeeze=False
    )
    longest = max(data.seconds for data in panels.values())
    for ax, (name, data) in zip(axes[:, 0], panels.items(), strict=True):
        draw_panel(ax, data, names)
        ax.set_title(f"{name}: {1e3 * data.seconds:.0f} ms", fontsize=11, weight="normal", pad=3)
        ax.set_xlim(0, 1e3 * longest * 1.01)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    handles = [Patch(color=style.colour(phase), label=phase) for phase in ("prefill", "decode")]
    handles += [Patch(facecolor="#DDDDDD", label="has a place, not in the step"), Patch(**_EMPTY, label="empty place")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def draw_panel(ax: Axes, data: BatchPlaces, names: Mapping[int, str]) -> None:
    """Draw one set of places, in milliseconds; changes `ax`."""
    whole = Rectangle((0, -0.42), 1e3 * data.seconds, data.num_places - 0.16, **_EMPTY)
    ax.add_patch(whole)
    for place, _, start, end in data.stays:
        ax.add_patch(Rectangle((1e3 * start, place - 0.42), 1e3 * (end - start), 0.84, facecolor="#DDDDDD", lw=0))
    for box in data.boxes:
        left, width = 1e3 * box.start, 1e3 * (box.end - box.start)
        ax.add_patch(
            Rectangle(
                (left, box.place - 0.42), width, 0.84, facecolor=style.colour(box.phase), edgecolor="white", lw=0.5
            )
        )
    for place, seq_id, start, _ in data.stays:
        first = next(box for box in data.boxes if box.seq_id == seq_id and box.place == place and box.end > start)
        ink = style.ink_on(style.colour(first.phase))
        ax.text(1e3 * start + 2, place, names[seq_id], color=ink, va="center", size=9, weight="bold")
    ax.set(ylim=(data.num_places - 0.5, -0.5))
    ax.set_yticks(range(data.num_places), [str(place + 1) for place in range(data.num_places)], size=8)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
