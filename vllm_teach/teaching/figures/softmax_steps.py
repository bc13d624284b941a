"""The online softmax of one row of scores, drawn as it is after each tile: what a slider steps through."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.attention.online_softmax import SoftmaxState, update
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class SoftmaxSteps:
    """One row: its scores `[keys]`, the tile size, and the state after 0, 1, … tiles (m, l, and acc `[value_dim]`).

    `rescale[i]` is the factor that tile i + 1 applied to what was summed before it: exp(m before - m after).
    """

    scores: tuple[float, ...]
    tile: int
    m: tuple[float, ...]
    l: tuple[float, ...]  # noqa: E741  the papers' name
    acc: tuple[tuple[float, ...], ...]
    rescale: tuple[float, ...]

    @property
    def tiles(self) -> int:
        """How many tiles the row has."""
        return len(self.rescale)

    def seen(self, step: int) -> int:
        """Keys seen after `step` tiles."""
        return min(step * self.tile, len(self.scores))

    def weights(self, step: int, keys: int, m: float) -> list[float]:
        """exp(score - m) of the first `keys` keys."""
        return [math.exp(score - m) for score in self.scores[:keys]] if step else []

    def out(self, step: int) -> list[float]:
        """The output if the row ended after `step` tiles: acc / l, and 0 before the first."""
        return [a / self.l[step] if self.l[step] else 0.0 for a in self.acc[step]]


def softmax_steps(scores: Sequence[float], values: Sequence[Sequence[float]], tile: int) -> SoftmaxSteps:
    """Run the package's `update` over `scores` `[keys]` and `values` `[keys, value_dim]`, keeping each state (float64).

    Raises InvalidArgumentError when there is no key, the lengths differ, or `tile` is below 1.
    """
    if not scores or len(scores) != len(values) or tile < 1:
        raise InvalidArgumentError(
            f"scores has {len(scores)} keys, values {len(values)}, tile is {tile}: "
            "give equal lengths and a tile of 1 or more."
        )
    s = torch.tensor([list(scores)], dtype=torch.float64)  # [1, keys]
    v = torch.tensor([list(value) for value in values], dtype=torch.float64)  # [keys, value_dim]
    states = [SoftmaxState.empty([1], v.shape[1], dtype=torch.float64)]
    for start in range(0, len(scores), tile):
        states.append(update(states[-1], s[:, start : start + tile], v[start : start + tile]))
    m = [float(state.m) for state in states]
    return SoftmaxSteps(
        scores=tuple(float(score) for score in scores),
        tile=tile,
        m=tuple(m),
        l=tuple(float(state.l) for state in states),
        acc=tuple(tuple(state.acc[0].tolist()) for state in states),
        rescale=tuple(math.exp(before - after) for before, after in itertools.pairwise(m)),
    )


def describe_step(data: SoftmaxSteps, step: int) -> str:
    """The state after `step` tiles in one line, two decimals."""
    if step == 0:
        return f"nothing seen: m = -inf, l = 0, acc = 0, out so far 0 (final {data.out(data.tiles)[0]:.2f})"
    old_l, rescale, new_l = data.l[step - 1], data.rescale[step - 1], data.l[step]
    return (
        f"m = {data.m[step]:.2f}, l = {rescale:.2f} x {old_l:.2f} + {new_l - rescale * old_l:.2f} = {new_l:.2f}, "
        f"out so far {data.out(step)[0]:.2f} (final {data.out(data.tiles)[0]:.2f})"
    )


def _title(data: SoftmaxSteps, step: int) -> str:
    if step == 0:
        return "Before the first tile: no maximum, no sum, no output"
    head = f"After tile {step} of {data.tiles}: "
    if step == 1:
        return head + f"the largest score so far is {data.m[1]:.1f}"
    if data.rescale[step - 1] < 1:
        return head + f"m rose, so all that was summed before counts {data.rescale[step - 1]:.2f} times"
    return head + "m stays, and the past keeps its weight"


def draw_softmax_step(data: SoftmaxSteps, step: int) -> Figure:
    """Draw the row after `step` tiles: its scores and m, the weights relative to m, l, and the output so far.

    Figure of 8.4 x 5.0 inches with fixed axes, so that a slider redraws it fast. Raises InvalidArgumentError for a
    step that is not there.
    """
    if not 0 <= step <= data.tiles:
        raise InvalidArgumentError(f"step is {step}; the row has {data.tiles} tiles, so use 0 to {data.tiles}.")
    figure = plt.figure(figsize=(8.4, 5.0), layout="none")
    figure.text(0.012, 0.975, _title(data, step), size=12, weight="bold", va="top", color=style.INK)
    _draw_scores(figure.add_axes((0.09, 0.56, 0.57, 0.32)), data, step)
    _draw_weights(figure.add_axes((0.09, 0.11, 0.57, 0.32)), data, step)
    _draw_sum(figure.add_axes((0.755, 0.56, 0.225, 0.32)), data, step)
    _draw_output(figure.add_axes((0.755, 0.11, 0.225, 0.32)), data, step)
    return figure


def _tile_colour(data: SoftmaxSteps, key: int, step: int) -> str:
    index = key // data.tile
    return style.colour("done" if index < step - 1 else "current" if index == step - 1 else "pending")


def _key_axis(ax: Axes, data: SoftmaxSteps) -> None:
    keys = len(data.scores)
    ax.set(xlim=(-0.6, keys - 0.4))
    ax.set_xticks(range(0, keys, max(1, keys // 8)))
    ax.grid(False)
    for edge in range(data.tile, keys, data.tile):
        ax.axvline(edge - 0.5, color="#C8C8C8", linewidth=1, zorder=0)


def _draw_scores(ax: Axes, data: SoftmaxSteps, step: int) -> None:
    colours = [_tile_colour(data, key, step) for key in range(len(data.scores))]
    edges = [style.INK if key < data.seen(step) else "#A8A8A8" for key in range(len(data.scores))]
    ax.bar(range(len(data.scores)), data.scores, color=colours, edgecolor=edges, linewidth=0.8, width=0.8)
    ax.axhline(0, color=style.INK, linewidth=0.8)
    top = max(*data.scores, 0)
    if step:
        ax.plot([-0.6, data.seen(step) - 0.5], [data.m[step]] * 2, color=style.colour("limit"), linewidth=2)
        ax.text(-0.5, data.m[step] + 0.04 * top, f"m = {data.m[step]:.1f}", color=style.colour("limit"), va="bottom")
    ax.set(ylim=(min(*data.scores, 0) - 0.1 * top, 1.25 * top), ylabel="score s")
    ax.set_title("The scores, tile by tile", size=10.5, weight="normal")
    _key_axis(ax, data)


def _draw_weights(ax: Axes, data: SoftmaxSteps, step: int) -> None:
    seen, before = data.seen(step), data.seen(step - 1)
    now = data.weights(step, seen, data.m[step])
    if step > 1 and data.rescale[step - 1] < 1:
        then = data.weights(step, before, data.m[step - 1])
        ax.bar(range(before), then, color="none", edgecolor=style.colour("baseline"), linestyle=":", width=0.8)
    colours = [_tile_colour(data, key, step) for key in range(seen)]
    ax.bar(range(seen), now, color=colours, edgecolor=style.INK, linewidth=0.8, width=0.8)
    ax.set(ylim=(0, 1.08), xlabel="key", ylabel="exp(s − m)")
    note = "Each key's weight relative to m"
    ax.set_title(note + (" (dotted: before)" if step > 1 else ""), size=10.5, weight="normal")
    _key_axis(ax, data)


def _draw_sum(ax: Axes, data: SoftmaxSteps, step: int) -> None:
    kept = data.rescale[step - 1] * data.l[step - 1] if step else 0.0
    ax.bar([0], [kept], color=style.colour("done"), edgecolor=style.INK, linewidth=0.8, width=0.62)
    ax.bar([0], [data.l[step] - kept], bottom=[kept], color=style.colour("current"), edgecolor=style.INK, width=0.62)
    final = data.l[-1]
    ax.bar([1], [final], color="none", edgecolor=style.INK, linewidth=1.4, linestyle="--", width=0.62)
    ax.set_xticks([0, 1], ["now", "final"])
    ax.set(xlim=(-0.6, 1.6), ylim=(0, 1.25 * max(data.l)), ylabel="l")
    for x, value in ((0, data.l[step]), (1, final)):
        ax.text(x, value + 0.02 * max(data.l), f"{value:.2f}", ha="center", va="bottom", size=10)
    ax.set_title("The sum l", size=10.5, weight="normal")
    ax.grid(False)


def _draw_output(ax: Axes, data: SoftmaxSteps, step: int) -> None:
    final, now = data.out(data.tiles), data.out(step)
    places = range(len(final))
    ax.bar(places, now, color=style.colour("tiled"), width=0.62)
    ax.bar(places, final, color="none", edgecolor=style.INK, linewidth=1.4, linestyle="--", width=0.76)
    every = [value for index in range(data.tiles + 1) for value in data.out(index)]
    span = max(every) - min(every)
    ax.set(
        ylim=(min(*every, 0) - 0.08 * span, max(*every, 0) + 0.08 * span), xlabel="value dimension", ylabel="acc / l"
    )
    ax.set_xticks(list(places))
    ax.axhline(0, color=style.INK, linewidth=0.8)
    ax.set_title("Output (dashed: final)", size=10.5, weight="normal")
    ax.grid(False)
