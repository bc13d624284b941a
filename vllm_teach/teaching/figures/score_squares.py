"""The scores of a call as squares, to scale, beside the square of the threshold: what the articles' rule compares."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class ScoreSquares:
    """Calls by name as (batch, length), and the threshold in tokens."""

    calls: dict[str, tuple[int, int]]
    threshold: int

    def scores(self, name: str) -> int:
        """The scores of one head, over the whole batch."""
        batch, length = self.calls[name]
        return batch * length**2

    def side(self, name: str) -> int:
        """The length of one sequence with as many scores, rounded down."""
        return math.isqrt(self.scores(name))

    def is_long(self, name: str) -> bool:
        """Whether the call reaches the threshold by its length or by its batch."""
        return max(self.side(name), self.calls[name][1]) >= self.threshold


def draw_score_squares(calls: Mapping[str, tuple[int, int]], threshold: int = 1024) -> tuple[Figure, ScoreSquares]:
    """Draw a panel per call: one square per sequence, side = its length, and the threshold's square as a dashed line.

    Raises InvalidArgumentError without calls.
    """
    if not calls:
        raise InvalidArgumentError("calls is empty: name at least one call as (batch, length).")
    data = ScoreSquares(dict(calls), threshold)
    figure, axes = plt.subplots(1, len(calls), figsize=(8.4, 3.5), squeeze=False, sharex=True, sharey=True)
    end = 0
    for ax, (name, (batch, length)) in zip(axes[0], calls.items(), strict=True):
        columns = math.ceil(math.sqrt(batch))
        end = max(end, columns * length, threshold)
        _draw_squares(ax, batch, length, columns)
        limit = style.colour("limit")
        ax.add_patch(Rectangle((0, 0), threshold, threshold, fill=False, edgecolor=limit, linestyle="--", linewidth=2))
        verdict = "long" if data.is_long(name) else "short"
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        ax.set_title(f"{name}: {verdict}\n{sequences} of {length:,}", size=10.5)
        ax.set_aspect("equal")
        ax.grid(False)
        style.label_axis(ax, "x", "keys", kind="tokens", ticks=(0, threshold, 2 * threshold))
        style.label_axis(ax, "y", "queries" if ax is axes[0][0] else "", kind="tokens", ticks=(0, threshold))
    axes[0][0].set(xlim=(-0.02 * end, 1.04 * end), ylim=(-0.02 * end, 1.04 * end))
    axes[0][0].text(
        threshold, threshold, f" {threshold:,}²", color=style.colour("limit"), size=10, ha="left", va="bottom"
    )
    return figure, data


def _draw_squares(ax: Axes, batch: int, length: int, columns: int) -> None:
    places = [((index % columns) * length, (index // columns) * length) for index in range(batch)]
    squares = [Rectangle(place, length, length) for place in places]
    fill = style.tint(style.colour("naive"), 0.55)
    ax.add_collection(PatchCollection(squares, facecolor=fill, edgecolor=style.PAPER, linewidth=0.8))
