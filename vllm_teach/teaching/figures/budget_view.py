"""One token budget at a glance: who has which place of the batch, and below what each step computes."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.teaching.figures.batch_places import BatchPlaces, draw_panel
from vllm_teach.teaching.figures.step_budget import StepBar, draw_step_bars


def draw_budget_view(
    places: BatchPlaces, bars: tuple[StepBar, ...], names: Mapping[int, str], *, title: str, seconds: float
) -> Figure:
    """Draw both on one time axis of `seconds`, the same for all pictures that are compared; returns the figure.

    The axis of tokens ends at the budget, so it differs from picture to picture.
    """
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 4.4), sharex=True, height_ratios=(1, 1.1))
    draw_panel(top, places, names)
    top.set_title(title)
    top.set_ylabel("place")
    draw_step_bars(bars, bottom, title="", seconds=seconds, top=1.2 * max(bar.budget for bar in bars))
    return figure
