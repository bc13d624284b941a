"""How often each backend would be called for the same traffic on several machines: counts, stacked as bars."""

from collections import Counter
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


def draw_call_frequency(counts: Mapping[str, Mapping[str, int]], title: str) -> tuple[Figure, dict[str, Counter[str]]]:
    """Draw a bar per machine, split by backend: `counts[machine][backend]` calls. Returns the figure and the counts.

    Raises InvalidArgumentError without machines, and for one without calls.
    """
    data = {machine: Counter(dict(calls)) for machine, calls in counts.items()}
    if not data or any(calls.total() == 0 for calls in data.values()):
        raise InvalidArgumentError(f"counts is {dict(counts)!r}: give at least one call on each machine.")
    figure, ax = plt.subplots(figsize=(8.4, 0.55 * len(data) + 1.5))
    names = dict.fromkeys(name for calls in data.values() for name, _ in calls.most_common())
    for row, calls in enumerate(data.values()):
        start = 0
        for name in names:
            count = calls[name]
            label = name if name not in ax.get_legend_handles_labels()[1] else None
            ax.barh(row, count, left=start, height=0.66, color=style.colour(name), edgecolor=style.PAPER, label=label)
            if count >= 0.06 * calls.total():
                ink = style.ink_on(style.colour(name))
                ax.text(start + count / 2, row, f"{count:,}", ha="center", va="center", size=10, color=ink)
            start += count
    ax.set_yticks(range(len(data)), list(data))
    ax.set_ylim(len(data) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    style.label_axis(ax, "x", "calls", kind="tokens")
    ax.set_title(title)
    figure.legend(loc="outside lower center", ncols=max(1, len(names)))
    return figure, data
