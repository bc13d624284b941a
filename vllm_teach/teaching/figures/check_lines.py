"""The rule that makes an outcome, as a number line: what holds, what has the direction only, what fails."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.verdict_grid import SPEAKS_FOR, verdict_colour
from vllm_teach.validation.audit.check import DIRECTION, FAILS, HOLDS, Check
from vllm_teach.validation.audit.finding import Finding, number

Zone = Literal["fails", "direction only", "holds"]


@dataclass(frozen=True)
class CheckLine:
    """A check, the finding it looks at and the outcome, and the zones of its line: (from, to, outcome), in order."""

    check: Check
    finding: Finding
    outcome: str
    zones: tuple[tuple[float, float, str], ...]


def check_line(check: Check, finding: Finding, low: float, high: float) -> CheckLine:
    """Cut the line from `low` to `high` where a finding without a spread changes its outcome.

    Raises InvalidArgumentError for ends that are not above 0 and in order: the line is logarithmic.
    """
    if not 0 < low < high:
        raise InvalidArgumentError(f"low={low!r}, high={high!r} are no ends of a logarithmic line: use 0 < low < high.")
    steps = 2000
    places = [low * (high / low) ** (step / steps) for step in range(steps + 1)]
    zones: list[tuple[float, float, str]] = []
    for place in places:
        outcome = check.outcome(Finding(check.finding, place, "", "arithmetic", "", place, place))
        if zones and zones[-1][2] == outcome:
            zones[-1] = (zones[-1][0], place, outcome)
        else:
            zones.append((zones[-1][1] if zones else place, place, outcome))
    return CheckLine(check, finding, check.outcome(finding), tuple(zones))


def draw_check_lines(lines: Sequence[CheckLine], *, title: str) -> Figure:
    """Draw a line for each check, coloured by outcome, with the finding's median as a dot and its spread as a bar."""
    figure, ax = plt.subplots(figsize=(8.4, 0.8 * len(lines) + 1.6))
    for y, line in enumerate(lines):
        for low, high, outcome in line.zones:
            fill = style.tint(verdict_colour(SPEAKS_FOR[outcome]), 0.55)
            ax.barh(y, high - low, left=low, height=0.36, color=fill, edgecolor="none")
        finding = line.finding
        if finding.low < finding.high:
            ax.plot([finding.low, finding.high], [y, y], color=style.INK, linewidth=3, solid_capstyle="butt")
        ax.plot([finding.value], [y], "o", color=style.INK, markersize=9)
        ax.annotate(
            f"{finding.text}: {line.outcome}", (finding.value, y), xytext=(0, 17), textcoords="offset points",
            ha="center", size=9.5,
        )  # fmt: skip
        if line.check.neutral:
            ax.plot([line.check.neutral] * 2, [y - 0.3, y + 0.3], color=style.INK, linestyle=":", linewidth=1.5)
    ends = [zone for line in lines for zone in line.zones]
    low, high = min(zone[0] for zone in ends), max(zone[1] for zone in ends)
    ax.set(xscale="log", xlim=(low, high), ylim=(len(lines) - 0.45, -0.75))
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50) if low <= tick <= high]
    ax.set_xticks(ticks, [number(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_yticks(range(len(lines)), ["\n".join(_broken(line.check.part)) for line in lines], size=9.5)
    ax.set_xlabel("finding, log scale; dotted: no effect")
    ax.grid(False)
    handles = [Patch(color=style.tint(verdict_colour(SPEAKS_FOR[name]), 0.55)) for name in (FAILS, DIRECTION, HOLDS)]
    mark = Line2D([], [], marker="o", color=style.INK, linewidth=3)
    labels = ["it fails", "direction only", "it holds", "finding and spread"]
    figure.legend([*handles, mark], labels, loc="outside lower center", ncols=4)
    ax.set_title(title)
    return figure


def _broken(text: str, width: int = 26) -> list[str]:
    """Break a label into about equal lines."""
    words, lines = text.split(), [""]
    aim = len(text) / math.ceil(len(text) / width)
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > aim + 4:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
