"""Attention's share of a layer: measured as n grows, and by arithmetic for several widths of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.shares import LayerShape, Share, flop_crossing, flop_share
from vllm_teach.teaching import style

_CLAIM_WIDTH = 1.19  # a claim's tick reaches from n divided by this to n times this
_WIDTH_SHADES = ("#4A1242", "#AA4499", "#DDA6D4")  # dark to light: narrow to wide, in the hue of attention


@dataclass(frozen=True)
class ShareData:
    """Where the curves cross a claim: n in tokens (None: not within the measured sizes), and the values drawn there."""

    time_crossing: float | None
    memory_crossing: float | None
    time_at: dict[int, float]
    memory_at: dict[int, float]


def crossing(shares: Mapping[int, float], level: float) -> float | None:
    """Return the n at which the share first reaches `level`, on a straight line between sizes over log n.

    None when it never does; the smallest size when it is above from the start.
    """
    sizes = sorted(shares)
    if shares[sizes[0]] >= level:
        return float(sizes[0])
    for low, high in pairwise(sizes):
        if shares[low] < level <= shares[high]:
            part = (level - shares[low]) / (shares[high] - shares[low])
            return exp(log(low) + part * (log(high) - log(low)))
    return None


def draw_measured_shares(
    shares: Sequence[Share],
    shape: LayerShape,
    *,
    time_claim: tuple[int, float],
    memory_claim: tuple[int, float],
    others: Mapping[str, Share] | None = None,
) -> tuple[Figure, ShareData]:
    """Draw the measured shares of time and of peak memory over n, with the share of FLOPs and the claims beside them.

    `shape` gives the FLOPs. A claim is (n, share). `others` are time shares of other shapes, drawn as open circles with
    their names. Returns figure and data.
    """
    time, memory = {s.n: s.time_share for s in shares}, {s.n: s.memory_share for s in shares}
    sizes = sorted(time)
    figure, ax = plt.subplots(figsize=(7.6, 4.3))
    # A white rim keeps a point apart from what lies under it.
    look: dict[str, Any] = {"mec": style.PAPER, "mew": 1.0, "markersize": 8}
    ax.plot(
        sizes, [memory[n] for n in sizes], "s-", color=style.colour("written"), label="peak memory, measured", **look
    )
    ax.plot(sizes, [time[n] for n in sizes], "o-", color=style.colour("attention"), label="time, measured", **look)
    flops = [flop_share(n, shape) for n in sizes]
    ax.plot(sizes, flops, "--", color=style.colour("baseline"), label="FLOPs, exact (baseline)")
    _claim(ax, *memory_claim, "written", f"claimed: memory, above {memory_claim[1]:.0%}")
    _claim(ax, *time_claim, "attention", f"claimed: time, {time_claim[1]:.0%}")
    for name, share in (others or {}).items():
        ax.plot(share.n, share.time_share, "o", mfc=style.PAPER, mec=style.colour("attention"), mew=2, markersize=8)
        ax.annotate(name, (share.n, share.time_share), (9, -4), textcoords="offset points", va="top", size=10)
    ax.set_title("Attention takes over the layer as the text grows")
    _axes(ax, sizes, "attention's share of one layer")
    ax.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.6)
    ax.legend(loc="center left", bbox_to_anchor=(0.0, 0.48))
    return figure, ShareData(crossing(time, time_claim[1]), crossing(memory, memory_claim[1]), time, memory)


def draw_flop_shares(
    shapes: Mapping[str, LayerShape], *, claim: tuple[int, float], longest: int = 131_072
) -> tuple[Figure, dict[str, float]]:
    """Draw attention's exact share of a layer's FLOPs over n for several shapes, narrowest first, at most three.

    Returns the figure and, by name, the n at which the share reaches the claim's level. `claim` is (n, share). Raises
    InvalidArgumentError for more shapes than there are shades.
    """
    if len(shapes) > len(_WIDTH_SHADES):
        raise InvalidArgumentError(f"shapes has {len(shapes)} entries; at most {len(_WIDTH_SHADES)} can be told apart.")
    sizes = np.geomspace(128, longest, 200)
    figure, ax = plt.subplots(figsize=(7.6, 4.0))
    ax.axhline(claim[1], color=style.colour("baseline"), linewidth=1.2, linestyle="--", zorder=1)
    crossings = {}
    for (name, shape), shade in zip(shapes.items(), _WIDTH_SHADES, strict=False):
        ax.plot(sizes, [flop_share(n, shape) for n in sizes], color=shade, label=name, zorder=2)
        crossings[name] = flop_crossing(claim[1], shape)
        ax.plot(crossings[name], claim[1], "o", color=shade, zorder=3)
    ax.annotate(f"{claim[1]:.0%}", (128, claim[1]), (2, 4), textcoords="offset points", size=10)
    _claim(ax, *claim, "attention")
    ax.annotate(
        f"claimed of the time\nat {claim[0]:,} tokens", claim, (0, 7), textcoords="offset points", ha="center", size=10
    )
    ax.set_title("The wider the model, the later attention dominates")
    _axes(ax, [2**p for p in range(7, 18, 2)], "attention's share of a layer's FLOPs")
    ax.legend(loc="upper left", bbox_to_anchor=(0.0, 0.66))
    return figure, crossings


def _claim(ax: Axes, n: int, share: float, concept: str, label: str | None = None) -> None:
    """Draw a published figure as a short horizontal tick around n, in the colour of the curve it is about.

    It lies under the curves, so that it hides no measured point.
    """
    ends, outline = [n / _CLAIM_WIDTH, n * _CLAIM_WIDTH], [Stroke(linewidth=5.5, foreground=style.INK), Normal()]
    look: dict[str, Any] = {"linewidth": 3, "solid_capstyle": "butt", "path_effects": outline}
    ax.plot(ends, [share] * 2, color=style.colour(concept), label=label, zorder=1.5, **look)


def _axes(ax: Axes, ticks: Sequence[int], label: str) -> None:
    style.label_axis(ax, "x", "sequence length n", unit="tokens", log=2, kind="tokens", ticks=ticks)
    style.label_axis(ax, "y", label)
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
