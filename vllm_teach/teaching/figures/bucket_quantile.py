"""How a percentile is read from a histogram's buckets, and how far it may be from the true one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

Buckets = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class BucketQuantile:
    """`value` as Prometheus' histogram_quantile estimates it: on the line across the bucket from `low` to `high`."""

    share: float
    value: float
    low: float
    high: float
    rank: float


def bucket_quantile(buckets: Buckets, share: float) -> BucketQuantile:
    """Return the quantile `share` (0 to 1) of (upper bound, how many were not above it) pairs, the last one infinite.

    In a bucket the values are taken to lie evenly; above the last finite bound that bound is all that can be said.
    Raises InvalidArgumentError for an empty histogram, or another `share`.
    """
    if not buckets or buckets[-1][1] <= 0 or not 0 <= share <= 1 or not math.isinf(buckets[-1][0]):
        raise InvalidArgumentError(
            f"share={share!r} of {len(buckets)} buckets is nothing: use 0 to 1, and a +Inf bucket."
        )
    rank = share * buckets[-1][1]
    low, below = 0.0, 0.0
    for high, count in buckets:
        if count >= rank and count > below:
            value = low if math.isinf(high) else low + (high - low) * (rank - below) / (count - below)
            return BucketQuantile(share, value, low, high, rank)
        low, below = high, count
    raise AssertionError("the last bucket holds everything")


def to_buckets(values: Sequence[float], bounds: Sequence[float]) -> list[tuple[float, float]]:
    """Count `values` as a Prometheus histogram does: for each bound, and for infinity, how many are not above it."""
    return [(bound, float(sum(value <= bound for value in values))) for bound in (*bounds, math.inf)]


def draw_bucket_quantile(buckets: Buckets, found: BucketQuantile, true: float, *, title: str) -> Figure:
    """Draw the cumulative counts, the line across the bucket that is hit, its reading and the true value."""
    finite = [(0.0, 0.0), *[(bound, count) for bound, count in buckets if math.isfinite(bound)]]
    bounds, counts = [bound for bound, _ in finite], [count for _, count in finite]
    figure, ax = plt.subplots(figsize=(7.6, 3.6))
    ax.plot(bounds, counts, "o-", color=style.colour("measured"), label="known: counts at the bounds")
    ax.axhline(found.rank, color=style.QUIET_INK, linestyle=":", label=f"rank of p{100 * found.share:g}")
    ax.axvspan(found.low, min(found.high, bounds[-1]), color=style.tint(style.colour("limit"), 0.15))
    ax.axvline(found.value, color=style.colour("limit"), linestyle="--", label=f"read: {found.value:.3g} s")
    ax.axvline(true, color=style.colour("ideal"), label=f"true: {true:.3g} s")
    style.label_axis(ax, "x", "latency", unit="s")
    style.label_axis(ax, "y", "requests not above it", kind="tokens")
    ax.set_xlim(0, min(bounds[-1], 2.2 * max(found.value, true)))
    ax.set_ylim(0.8 * found.rank, 1.02 * buckets[-1][1])
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure
