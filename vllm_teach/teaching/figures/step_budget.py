"""What each step computed, to scale: as wide as the step took, as high as it had tokens, below the token budget."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.engine.events import LogEntry, Scheduled
from vllm_teach.engine.phases import read_story
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class StepBar:
    """One step: from `start` to `end` (seconds from the log's first event), its tokens by kind, and its budget."""

    start: float
    end: float
    decode: int
    prefill: int
    budget: int

    @property
    def tokens(self) -> int:
        """Tokens of both kinds."""
        return self.decode + self.prefill


def step_bars(log: Iterable[LogEntry]) -> tuple[StepBar, ...]:
    """Read the steps from an engine's events. Raises InvalidArgumentError for a log without one."""
    entries = list(log)
    steps = read_story(entries).steps
    if not steps:
        raise InvalidArgumentError("log has no step that was computed: let the engine make one first.")
    zero = entries[0].time
    return tuple(
        StepBar(
            step.start - zero,
            step.end - zero,
            step.ended.num_decode_tokens,
            step.ended.num_prefill_tokens,
            step.ended.token_budget,
        )
        for step in steps
    )


def step_table(log: Iterable[LogEntry], names: Mapping[int, str]) -> str:
    """Return the plans as text: a line for each step, with the tokens of each sequence that `names` knows."""
    plans: dict[int, dict[int, int]] = {}
    for entry in log:
        if isinstance(entry.event, Scheduled):
            plans.setdefault(entry.step, {})[entry.event.seq_id] = entry.event.num_tokens
    lines = ["step" + "".join(f"{name:>5}" for name in names.values()) + "   tokens"]
    for step, plan in plans.items():
        cells = "".join(f"{plan.get(seq_id, '.'):>5}" for seq_id in names)
        lines.append(f"{step:>4}{cells}   {sum(plan.values()):>6}")
    return "\n".join(lines)


def draw_step_bars(
    bars: tuple[StepBar, ...],
    ax: Axes | None = None,
    *,
    title: str = "The budget caps a step",
    seconds: float | None = None,
    top: float | None = None,
) -> Figure:
    """Draw the bars; `seconds` and `top` fix the axes' ends, for pictures that are compared. Returns the figure."""
    if ax is None:
        _, ax = plt.subplots(figsize=(8.4, 3.4))
    for bar in bars:
        left, width = 1e3 * bar.start, 1e3 * (bar.end - bar.start)
        for low, height, phase in ((0, bar.decode, "decode"), (bar.decode, bar.prefill, "prefill")):
            if height:
                ax.add_patch(
                    Rectangle((left, low), width, height, facecolor=style.colour(phase), edgecolor="white", lw=0.4)
                )
    edges = [1e3 * bar.start for bar in bars] + [1e3 * bars[-1].end]
    ax.stairs([bar.budget for bar in bars], edges, color=style.colour("limit"), linewidth=1.4, baseline=None)
    highest = max(max(bar.tokens for bar in bars), min(bar.budget for bar in bars))
    ax.set(xlim=(0, 1e3 * (seconds or bars[-1].end)), ylim=(0, 1.08 * (top or highest)))
    ax.set(xlabel="time (ms, modelled)", ylabel="tokens of the step", title=title)
    handles: list[Any] = [Patch(color=style.colour(phase), label=phase) for phase in ("prefill", "decode")]
    handles += ax.plot([], [], color=style.colour("limit"), label="token budget")
    ax.legend(handles=handles, loc="upper right", ncols=3)
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure
