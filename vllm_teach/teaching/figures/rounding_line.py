"""A group of weights on a number line, above the grid that they are rounded to."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.quantization.rounding import quantize_rtn
from vllm_teach.teaching import style


@dataclass(frozen=True, eq=False)
class RoundingLine:
    """One group: its weights `[size]`, the points of its grid, where each weight went `[size]`, and the root mean
    square of what rounding changed, as a share of the weights' own.
    """

    bits: int
    weights: torch.Tensor
    grid: torch.Tensor
    rounded: torch.Tensor
    scale: float
    zero: int

    @property
    def error(self) -> float:
        """The root mean square of rounded - weight over that of the weights, 0 to 1."""
        return float((self.rounded - self.weights).square().sum().sqrt() / self.weights.square().sum().sqrt())

    @property
    def points_used(self) -> int:
        """How many points of the grid have a weight."""
        return len(self.rounded.unique())


def rounding_line(weights: torch.Tensor, bits: int) -> RoundingLine:
    """Return `weights` `[size]` as one group, rounded to nearest in `bits` bits."""
    found = quantize_rtn(weights[None], bits, group_size=None)
    scale, zero = float(found.scales[0, 0]), int(found.zeros[0, 0])
    grid = (torch.arange(2**bits) - zero) * scale
    return RoundingLine(bits, weights, grid, found.dequantize()[0], scale, zero)


def describe_rounding(data: RoundingLine) -> str:
    """Say in one line what the picture shows."""
    return (
        f"{2**data.bits} points, {data.points_used} of them used; step {data.scale:.4f}, 0 is code {data.zero}; "
        f"error {data.error:.1%} of the weights"
    )


def draw_rounding_line(data: RoundingLine, ax: Axes | None = None) -> Figure:
    """Draw the weights above and the grid below, with a line from each weight to its point. Returns the figure."""
    if ax is None:
        _, ax = plt.subplots(figsize=(8.0, 2.5))
    figure = ax.figure
    assert isinstance(figure, Figure)
    used = torch.isin(data.grid, data.rounded)
    ax.vlines(data.grid.tolist(), 0, 0.25, color=style.colour("baseline"), linewidth=1.0)
    ax.plot(data.grid[used].tolist(), [0.0] * int(used.sum()), "o", color=style.colour("rtn"), clip_on=False)
    ax.plot(data.grid[~used].tolist(), [0.0] * int((~used).sum()), "o", color="#BBBBBB", markersize=4, clip_on=False)
    for weight, there in zip(data.weights.tolist(), data.rounded.tolist(), strict=True):
        ax.plot([weight, there], [1, 0.25], color=style.colour("rtn"), linewidth=0.7, alpha=0.6)
    ax.plot(data.weights.tolist(), [1.0] * len(data.weights), "|", color=style.INK, markersize=12)
    ax.text(0.0, 1.02, "weights", transform=ax.transAxes, size=9, va="bottom")
    ax.set(ylim=(-0.12, 1.25), yticks=[])
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    style.label_axis(ax, "x", "value")
    ax.set_title(f"{data.bits} bits: {2**data.bits} points, error {data.error:.1%}", pad=16)
    return figure
