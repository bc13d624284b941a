"""Time to read a sequence's blocks over the block size: in one run, and scattered, for each backend."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.paged_read import PagedRead
from vllm_teach.teaching import style


def draw_paged_reads(reads: Sequence[PagedRead]) -> Figure:
    """Draw two lines a backend, solid for one run and dashed for scattered blocks. Returns the figure.

    Raises InvalidArgumentError without a read.
    """
    if not reads:
        raise InvalidArgumentError("reads is empty: measure at least one backend.")
    figure, ax = plt.subplots(figsize=(7.4, 3.9))
    for read in reads:
        look = {"color": style.colour(read.backend), "marker": "o"}
        ax.plot(read.block_sizes, read.one_run, label=f"{read.backend}, one run", **look)
        ax.plot(read.block_sizes, read.scattered, linestyle="--", label=f"{read.backend}, scattered", **look)
    sizes = reads[0].block_sizes
    style.label_axis(ax, "x", "block size", unit="tokens", log=2, ticks=sizes)
    ax.set_xticklabels([f"{size}" for size in sizes])
    style.label_axis(ax, "y", "attention of one layer, one step", kind="seconds")
    ax.set_ylim(bottom=0)
    ax.set_title("Scattered blocks cost those who gather them")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, handlelength=3.5)
    return figure
