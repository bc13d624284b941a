"""What a limit on time does to an overload: how many are answered, and what was computed for nobody."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.performance.fleet import FleetRun
from vllm_teach.teaching import style


def draw_patience(runs: Mapping[str, FleetRun], *, title: str) -> Figure:
    """Draw three bars for each run: requests answered, and tokens computed for nobody, in %; tokens a second."""
    names = list(runs)
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.8), sharey=True)
    panels = (
        ("answered", "%", [100 * len(run.answered) / len(run.times) for run in runs.values()], "done"),
        ("computed for nobody", "%", [100 * run.wasted_tokens / run.computed_tokens for run in runs.values()], "naive"),
        ("in whole answers", "tokens/s", [run.throughput for run in runs.values()], "measured"),
    )
    for ax, (name, unit, values, concept) in zip(axes, panels, strict=True):
        bars = ax.barh(names, values, color=style.colour(concept), height=0.6)
        ax.bar_label(bars, [f"{value:.0f}" for value in values], padding=3, size=10)
        ax.set_xlim(0, 1.2 * max(*values, 1))
        style.label_axis(ax, "x", name, unit=unit)
        ax.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    figure.suptitle(f"{title} (modelled)", x=0.01, ha="left", weight="bold", size=12)
    return figure
