"""Who waits for whom: the requests of several services over time, and how long a question about health took."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.spans import Spans
from vllm_teach.teaching import style


def draw_request_spans(services: Mapping[str, Spans], *, title: str) -> Figure:
    """Draw a panel for each service, all on one axis of time: a bar a request, and below them the health checks."""
    if not services or not all(spans.requests for spans in services.values()):
        raise InvalidArgumentError("services has one without requests: give at least one span for each.")
    figure, axes = plt.subplots(
        1, len(services), figsize=(8.4, 3.4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for (name, spans), ax in zip(services.items(), axes[0], strict=True):
        _draw_bars(ax, spans.requests, style.sequence_fill(0), style.INK, first=1)
        # Many are thinner than a line: their edge must not hide them.
        _draw_bars(ax, spans.health, style.colour("limit"), style.colour("limit"), first=-0.4)
        ax.set_title(name, size=11, weight="normal")
        style.label_axis(ax, "x", "time since the first was sent", unit="s")
    most = max(len(spans.requests) for spans in services.values())
    axes[0][0].set_yticks([-0.4, *range(1, most + 1)], ["/health", *[str(number) for number in range(1, most + 1)]])
    axes[0][0].set_ylabel("request")
    axes[0][0].set_ylim(most + 0.7, -1.2)
    axes[0][0].set_xlim(left=0)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure


def _draw_bars(ax: plt.Axes, spans: Sequence[tuple[float, float]], fill: str, edge: str, first: float) -> None:
    """One row a span from `first` downwards; all health checks, which may be many, share the row above."""
    for number, (begin, end) in enumerate(spans):
        row = first + number if first > 0 else first
        ax.barh(row, max(end - begin, 0.0), left=begin, height=0.7, color=fill, edgecolor=edge, linewidth=0.6)
