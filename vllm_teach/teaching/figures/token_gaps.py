"""The time between one token of a request and the next: the same request, alone and beside others."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.teaching import style

_LOOKS = (("^", "#999933"), ("s", "#882255"), ("o", "#0072B2"))


def draw_token_gaps(gaps: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Draw the gaps in seconds, one point for each token after the first, on a logarithmic axis."""
    figure, ax = plt.subplots(figsize=(8.4, 3.4))
    for (name, seconds), (marker, ink) in zip(gaps.items(), _LOOKS, strict=False):
        tokens = range(2, len(seconds) + 2)
        ax.plot(tokens, seconds, f"{marker}-", color=ink, label=name, markersize=5, linewidth=1)
    style.label_axis(ax, "x", "token of the answer")
    style.label_axis(ax, "y", "wait for it", kind="seconds", log=10)
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure
