"""A server's metrics over time, as a dashboard shows them: what stands in the scrapes, and rates between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.metrics.scrape import Scrape
from vllm_teach.teaching import style


@dataclass(frozen=True)
class GaugeSeries:
    """One value a scrape: seconds since the first, sequences running and waiting, the share of blocks held.

    `tokens_per_second` is the increase of the counter from one scrape to the next, by the time between: one value less.
    """

    times: tuple[float, ...]
    running: tuple[float, ...]
    waiting: tuple[float, ...]
    held_share: tuple[float, ...]
    tokens_per_second: tuple[float, ...]


def gauge_series(scrapes: Sequence[Scrape]) -> GaugeSeries:
    """Read the series from scrapes in the order of time. Needs two or more."""
    if len(scrapes) < 2:
        raise InvalidArgumentError(f"scrapes has {len(scrapes)}: a rate needs two.")
    tokens = [(each.moment, each.value("vllm:generation_tokens_total")) for each in scrapes]
    return GaugeSeries(
        tuple(each.moment - scrapes[0].moment for each in scrapes),
        tuple(each.value("vllm:num_requests_running") for each in scrapes),
        tuple(each.value("vllm:num_requests_waiting") for each in scrapes),
        tuple(each.value("vllm:kv_cache_usage_perc") for each in scrapes),
        tuple((after - before) / (end - begin) for (begin, before), (end, after) in pairwise(tokens)),
    )


def draw_server_gauges(data: GaugeSeries, *, title: str) -> Figure:
    """Draw three panels one above the other on one axis of time; returns the figure."""
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7.6, 5.2), sharex=True)
    top.step(data.times, data.running, where="post", color=style.colour("decode"), label="running")
    top.step(data.times, data.waiting, where="post", color=style.colour("limit"), linestyle="--", label="waiting")
    top.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    style.label_axis(top, "y", "sequences")
    middle.step(data.times, [100 * share for share in data.held_share], where="post", color=style.colour("paged"))
    style.label_axis(middle, "y", "blocks held", unit="%")
    middle.set_ylim(0, 105)
    bottom.stairs(data.tokens_per_second, data.times, color=style.colour("measured"), linewidth=2)
    style.label_axis(bottom, "y", "output", unit="tokens/s")
    for ax in (top, bottom):
        ax.set_ylim(bottom=0)
    style.label_axis(bottom, "x", "time", unit="s")
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
