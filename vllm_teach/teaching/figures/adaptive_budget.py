"""A token budget that follows a latency target: seconds of each step with decodes above, its budget below."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.step_budget import StepBar


@dataclass(frozen=True)
class AdaptiveBudget:
    """The steps in which somebody decoded, in order: number of the step, seconds, and the budget it had."""

    target: float
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    budgets: tuple[int, ...]

    def over(self, start: int = 0, end: int | None = None) -> float:
        """Return the share of these steps, by position among them, that took longer than the target."""
        part = self.seconds[start:end]
        return sum(seconds > self.target for seconds in part) / len(part)


def adaptive_budget(bars: tuple[StepBar, ...], target: float) -> AdaptiveBudget:
    """Pick the steps with decodes; only they make somebody wait for the next token."""
    chosen = [(number, bar) for number, bar in enumerate(bars, start=1) if bar.decode]
    if not chosen:
        raise InvalidArgumentError("bars has no step with decodes: nobody waited for a next token.")
    return AdaptiveBudget(
        target,
        tuple(number for number, _ in chosen),
        tuple(bar.end - bar.start for _, bar in chosen),
        tuple(bar.budget for _, bar in chosen),
    )


def draw_adaptive_budget(data: AdaptiveBudget, fixed: AdaptiveBudget, *, title: str, last_step: int) -> Figure:
    """Draw `data` and, as the baseline, the same requests under a `fixed` budget, up to `last_step`."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 4.6), sharex=True)
    for each, ink, name, size in (
        (fixed, style.colour("baseline"), "fixed budget", 10),
        (data, style.colour("measured"), "budget follows the target", 14),
    ):
        top.scatter(each.steps, [1e3 * s for s in each.seconds], s=size, color=ink, label=name, linewidths=0)
        bottom.step(each.steps, each.budgets, where="post", color=ink, linewidth=1.6)
    top.axhline(1e3 * data.target, color=style.colour("limit"), linestyle="--", label="target")
    style.label_axis(top, "y", "step", unit="ms, modelled")
    top.set_ylim(bottom=0)
    top.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3)
    ticks = [2**power for power in range(0, 20) if min(data.budgets) / 2 <= 2**power <= max(fixed.budgets)]
    style.label_axis(bottom, "y", "token budget", kind="tokens", log=2, ticks=ticks)
    bottom.set_ylim(ticks[0], 1.2 * max(fixed.budgets))
    bottom.set_xlim(0, last_step + 1)
    style.label_axis(bottom, "x", "step", kind="tokens")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
