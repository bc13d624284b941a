"""Recompute or swap: the seconds of both for a sequence of n tokens, measured or modelled, and where they cross."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_LOOKS = {"recompute": ("o", "limit"), "swap": ("s", "written")}


@dataclass(frozen=True)
class CostCurves:
    """Seconds of recomputing and of swapping (out and in) by length, and from how many tokens on swap is cheaper."""

    lengths: tuple[int, ...]
    recompute: tuple[float, ...]
    swap: tuple[float, ...]
    crossover: float


def modelled_curves(costs: PreemptionCosts, lengths: Sequence[int]) -> CostCurves:
    """Return what the cost model says at `lengths`."""
    return CostCurves(
        tuple(lengths),
        tuple(costs.recompute_seconds(n) for n in lengths),
        tuple(costs.swap_seconds(n) for n in lengths),
        costs.crossover,
    )


def draw_cost_curves(panels: Mapping[str, CostCurves], *, title: str) -> Figure:
    """Draw a panel for each, both axes logarithmic; a ring marks the crossing where there is one in sight."""
    if not panels:
        raise InvalidArgumentError("panels is empty: give at least one pair of curves.")
    figure, axes = plt.subplots(1, len(panels), figsize=(8.4, 3.7), squeeze=False, sharey=True)
    for ax, (name, curves) in zip(axes[0], panels.items(), strict=True):
        _draw(ax, curves)
        ax.set_title(name, fontsize=11, weight="normal")
    style.label_axis(axes[0][0], "y", "time", kind="seconds", log=10)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw(ax: Axes, curves: CostCurves) -> None:
    for name, values in (("recompute", curves.recompute), ("swap", curves.swap)):
        marker, concept = _LOOKS[name]
        label = "recompute" if name == "recompute" else "swap out and in"
        ax.plot(curves.lengths, values, f"{marker}-", color=style.colour(concept), label=label, markersize=5)
    if curves.lengths[0] <= curves.crossover <= curves.lengths[-1]:
        ax.axvline(curves.crossover, color=style.QUIET_INK, linewidth=1, linestyle=":")
        place = (curves.crossover, min(curves.recompute[0], curves.swap[0]))
        text = f"{curves.crossover:,.0f} tokens "
        ax.annotate(text, place, ha="right", va="bottom", size=10, color=style.QUIET_INK)
    style.label_axis(ax, "x", "tokens to restore", kind="tokens", log=2, ticks=curves.lengths[::4])
    ax.set_yscale("log")
