"""What more engines on one device do to its throughput."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.fleet import FleetRun
from vllm_teach.teaching import style

_LOOKS = (("o-", "#0072B2"), ("s-", "#882255"), ("^-", "#E69F00"))


def relative_throughput(runs: Mapping[int, FleetRun]) -> dict[int, float]:
    """Return the throughput by the number of workers, that of one being 1. Raises InvalidArgumentError without it."""
    if 1 not in runs:
        raise InvalidArgumentError(f"runs has the workers {sorted(runs)}: one worker is the baseline, give it, too.")
    return {workers: runs[workers].throughput / runs[1].throughput for workers in sorted(runs)}


def draw_worker_sweep(lines: Mapping[str, Mapping[int, float]], *, title: str) -> Figure:
    """Draw for each name the relative throughput over the number of workers; returns the figure."""
    figure, ax = plt.subplots(figsize=(7.6, 3.6))
    ax.axhline(1, color=style.colour("baseline"), linestyle=":", label="one engine")
    for (name, values), (look, ink) in zip(lines.items(), _LOOKS, strict=False):
        ax.plot(list(values), list(values.values()), look, color=ink, label=name)
    style.label_axis(ax, "x", "engines on the device", ticks=sorted({k for values in lines.values() for k in values}))
    style.label_axis(ax, "y", "relative throughput", unit="modelled")
    ax.set_ylim(0, 1.25)
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure
