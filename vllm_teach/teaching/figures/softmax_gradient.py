"""The gradient of one softmax row as bars: which scores should rise, and by how much, against the row's own average."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class SoftmaxGradient:
    """One row: its probabilities, the derivatives of the loss by them (dP) and by the scores (dS), and D = sum P dP."""

    probabilities: tuple[float, ...]
    dp: tuple[float, ...]
    average: float
    ds: tuple[float, ...]


def softmax_gradient(weights: Sequence[float], dp: Sequence[float]) -> SoftmaxGradient:
    """Compute dS of a row whose exponentials are `weights`; InvalidArgumentError for none, or not as many as `dp`."""
    if not weights or len(weights) != len(dp):
        raise InvalidArgumentError(f"weights has {len(weights)} entries and dp {len(dp)}: give one of each for a key.")
    total = sum(weights)
    probabilities = tuple(weight / total for weight in weights)
    average = sum(p * slope for p, slope in zip(probabilities, dp, strict=True))
    ds = tuple(p * (slope - average) for p, slope in zip(probabilities, dp, strict=True))
    return SoftmaxGradient(probabilities, tuple(dp), average, ds)


def draw_softmax_gradient(weights: Sequence[float], dp: Sequence[float], tile: int) -> tuple[Figure, SoftmaxGradient]:
    """Draw dP with the line D beside dS, the keys of one tile in one colour; returns the figure and its data."""
    data = softmax_gradient(weights, dp)
    fills = [style.colour("done" if key // tile % 2 == 0 else "current") for key in range(len(dp))]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8.4, 3.3))
    _bars(left, data.probabilities, fills, "P: the row's weights")
    _bars(middle, data.dp, fills, "dP, and the average D")
    _bars(right, data.ds, fills, "dS = P · (dP − D)")
    middle.axhline(data.average, color=style.colour("limit"), linewidth=2)
    middle.text(-0.4, data.average, f" D = {data.average:g}", color=style.colour("limit"), va="bottom", size=10)
    right.axhline(0, color=style.INK, linewidth=1)
    figure.suptitle(
        "A score should rise if its value beats the row's average", x=0.01, ha="left", fontsize=12, weight="bold"
    )
    return figure, data


def _bars(ax: Axes, values: Sequence[float], fills: list[str], title: str) -> None:
    keys = range(len(values))
    ax.bar(keys, values, color=fills, edgecolor=style.INK, linewidth=0.6, width=0.72)
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.16 * (high - low)
    ax.set_ylim(low - (room if low < 0 else 0), high + room)
    for key, value in zip(keys, values, strict=True):
        below = value < 0
        ax.annotate(
            f"{value:.2g}" if abs(value) < 1 and value else f"{value:g}",
            (key, value),
            (0, -3 if below else 3),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            size=10,
        )
    ax.set_title(title, fontsize=11, weight="normal")
    ax.set_xticks(list(keys))
    ax.set_xlabel("key")
    ax.grid(visible=False)
