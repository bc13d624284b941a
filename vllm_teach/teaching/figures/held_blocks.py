"""Blocks that are held after each request has ended: a line that rises is a leak."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vllm_teach.teaching import style

_LOOKS = (("o-", "naive"), ("s-", "paged"))


def draw_held_blocks(held: Mapping[str, Sequence[int]], num_blocks: int, *, title: str) -> Figure:
    """Draw for each manager the blocks that block tables hold when request 1, 2, … has ended, and the pool's size."""
    figure, ax = plt.subplots(figsize=(7.0, 3.2))
    ax.axhline(num_blocks, color=style.colour("limit"), linestyle="--", label=f"the pool: {num_blocks} blocks")
    for (name, counts), (look, concept) in zip(held.items(), _LOOKS, strict=False):
        ax.plot(range(1, len(counts) + 1), counts, look, color=style.colour(concept), label=name, markersize=5)
    style.label_axis(ax, "x", "requests ended")
    style.label_axis(ax, "y", "blocks held by nobody's request", kind="tokens")
    ax.set_ylim(0, num_blocks * 1.12)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure
