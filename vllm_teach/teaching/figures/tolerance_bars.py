"""How many rows keep each verdict while the tolerances of an audit are stretched."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.verdict_grid import LOOKS, verdict_colour
from vllm_teach.validation.audit.finding import number
from vllm_teach.validation.audit.tolerance import ToleranceSweep


def draw_tolerance(sweep: ToleranceSweep, *, title: str) -> Figure:
    """Draw a bar of verdicts for each factor by which every range is stretched."""
    figure, ax = plt.subplots(figsize=(7.0, 3.4))
    places, below = range(len(sweep.factors)), [0] * len(sweep.factors)
    for name in LOOKS:
        counts = sweep.counts[name]
        if any(counts):
            bars = ax.bar(places, counts, bottom=below, width=0.7, color=verdict_colour(name), label=name)
            ink = style.ink_on(verdict_colour(name))
            ax.bar_label(bars, [str(count or "") for count in counts], label_type="center", color=ink, size=9)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    ax.set_xticks(places, [number(factor) for factor in sweep.factors])
    ax.set(
        ylim=(0, 1.02 * sweep.num_rows),
        xlabel="all two-sided ranges stretched by a factor of (1: as they are)",
        ylabel="rows",
    )
    ax.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=4)
    ax.set_title(title)
    return figure
