"""Two published rates and their ratio beside what a model says under each reading of what was not published."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.teaching import style
from vllm_teach.validation.audit.finding import number


@dataclass(frozen=True)
class Reading:
    """Tokens a second of the baseline and of the optimised system."""

    baseline: float
    optimised: float

    @property
    def ratio(self) -> float:
        """How many times faster the optimised system is."""
        return self.optimised / self.baseline


def draw_readings(readings: Mapping[str, Reading], claimed: Reading, *, title: str) -> Figure:
    """Draw both rates of each reading as bars beside the claimed ones, and at the right the ratios; log scales."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 0.5 * len(readings) + 1.9), sharey=True, width_ratios=(1.7, 1)
    )
    names = list(readings)
    for shift, name, concept in ((-0.19, "baseline", "naive"), (0.19, "optimised", "paged")):
        values = [getattr(reading, name) for reading in readings.values()]
        places = [y + shift for y in range(len(names))]
        bars = left.barh(places, values, height=0.34, color=style.colour(concept), label=f"{name}, modelled")
        left.bar_label(
            bars, [number(round(value)) for value in values], label_type="center", size=9.5, color=style.INK,
            bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        left.axvline(
            getattr(claimed, name), color=style.colour(concept), linestyle="--", linewidth=1.6,
            label=f"{name}, claimed: {number(getattr(claimed, name))}",
        )  # fmt: skip
    ratios = [reading.ratio for reading in readings.values()]
    bars = right.barh(range(len(names)), ratios, height=0.5, color=style.colour("measured"))
    right.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios], label_type="center", size=9.5, color=style.PAPER)
    right.axvline(claimed.ratio, color=style.INK, linestyle="--", linewidth=1.6, label=f"claimed: {claimed.ratio:.1f}")
    left.set(xscale="log", xlim=(10, 8000), ylim=(len(names) - 0.5, -0.5))
    right.set(xscale="log", xlim=(1, 150))
    left.set_yticks(range(len(names)), names)
    right.set_xticks([1, 10, 100], ["1", "10", "100"])
    style.label_axis(left, "x", "output tokens a second", unit="log scale")
    style.label_axis(right, "x", "ratio", unit="log scale")
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
        ax.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, fontsize=9.5)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
