"""What the engine did in each step, to scale in time: a row for each request, a bar for each step it took part in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.request import Request
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class Step:
    """One engine step: how long it took, and how many tokens it computed for each request, prompt or not."""

    seconds: float
    prefill: Mapping[str, int]
    decode: Mapping[str, int]


@dataclass(frozen=True)
class Bar:
    """A request's part in one step: from `start` for `seconds`, `tokens` of kind "prefill" or "decode"."""

    request: str
    start: float
    seconds: float
    tokens: int
    phase: str


@dataclass(frozen=True)
class Timeline:
    """The bars, the moments between steps, and tokens computed per second in steps with and without prefill."""

    bars: tuple[Bar, ...]
    edges: tuple[float, ...]
    prefill_rate: float
    decode_rate: float


def record_step(engine: LLMEngine, requests: Mapping[str, Request]) -> Step:
    """Return what the engine's last step did for `requests`, by the names they have there; other requests are left out.

    The sequences of one request (`n` above 1) are added up. Raises InvalidArgumentError before the first step.
    """
    if engine.last_step is None:
        raise InvalidArgumentError("engine has made no step yet: call engine.step() first.")
    name_of = {sequence.seq_id: name for name, request in requests.items() for sequence in request.sequences}
    prefill: dict[str, int] = {}
    decode: dict[str, int] = {}
    for item in engine.last_plan.items:
        if item.sequence.seq_id in name_of:
            name, tokens = name_of[item.sequence.seq_id], decode if item.is_decode else prefill
            tokens[name] = tokens.get(name, 0) + item.num_tokens
    return Step(engine.last_step.seconds, prefill, decode)


def step_table(steps: Sequence[Step]) -> str:
    """Return the steps' token counts as text, a line each: the same on every machine."""
    names = list(dict.fromkeys(name for step in steps for name in (*step.prefill, *step.decode)))
    lines = ["step" + "".join(f"{name:>6}" for name in names) + "   computed"]
    for number, step in enumerate(steps, start=1):
        counts = {name: step.prefill.get(name, 0) + step.decode.get(name, 0) for name in (*step.prefill, *step.decode)}
        cells = "".join(f"{counts.get(name, '.'):>6}" for name in names)
        kinds = "prefill + decode" if step.prefill and step.decode else "prefill" if step.prefill else "decode"
        lines.append(f"{number:>4}{cells}   {sum(counts.values()):>3} ({kinds})")
    return "\n".join(lines)


def timeline(steps: Sequence[Step]) -> Timeline:
    """Lay the steps behind one another. Raises InvalidArgumentError without a prefill step and a pure decode step."""
    edges, bars = [0.0], []
    for step in steps:
        for phase, tokens in (("prefill", step.prefill), ("decode", step.decode)):
            bars += [Bar(name, edges[-1], step.seconds, count, phase) for name, count in tokens.items()]
        edges.append(edges[-1] + step.seconds)
    with_prefill = [step for step in steps if step.prefill]
    pure_decode = [step for step in steps if step.decode and not step.prefill]
    if not with_prefill or not pure_decode:
        raise InvalidArgumentError(
            f"steps has {len(steps)} entries: give at least one prefill and one pure decode step."
        )
    return Timeline(tuple(bars), tuple(edges), _rate(with_prefill), _rate(pure_decode))


def _rate(steps: Sequence[Step]) -> float:
    tokens = sum(sum(step.prefill.values()) + sum(step.decode.values()) for step in steps)
    return tokens / sum(step.seconds for step in steps)


def draw_timeline(steps: Sequence[Step]) -> tuple[Figure, Timeline]:
    """Draw the steps on a time axis in milliseconds; the number in a bar is how many tokens it computed."""
    data = timeline(steps)
    names = list(dict.fromkeys(bar.request for bar in data.bars))
    figure, ax = plt.subplots(figsize=(8.4, 0.55 * len(names) + 1.75))
    for bar in data.bars:
        _draw_bar(ax, bar, names.index(bar.request), data.edges[-1])
    for edge in data.edges:
        ax.axvline(1e3 * edge, color="#E2E2E2", linewidth=0.8, zorder=0)
    ax.set(xlim=(0, 1e3 * data.edges[-1]), ylim=(len(names) - 0.4, -0.6), xlabel="time since the first step (ms)")
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title("A prompt takes one step, then every step adds one token", pad=28)
    phases = [Patch(color=style.colour(phase), label=phase) for phase in ("prefill", "decode")]
    ax.legend(handles=phases, loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=2, borderaxespad=0.2)
    return figure, data


def _draw_bar(ax: Axes, bar: Bar, row: int, total: float) -> None:
    fill = style.colour(bar.phase)
    left, width = 1e3 * bar.start, 1e3 * bar.seconds
    ax.add_patch(Rectangle((left, row - 0.36), width, 0.72, facecolor=fill, edgecolor=style.PAPER, linewidth=1.2))
    # Roughly one digit per 1.2 % of the axis; a number that would not fit its bar is left out.
    if bar.seconds / total > 0.013 * len(str(bar.tokens)):
        ax.text(left + width / 2, row, str(bar.tokens), ha="center", va="center", size=10, color=style.ink_on(fill))
