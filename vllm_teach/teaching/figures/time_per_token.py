"""Seconds for one more token against the length of the text so far, without a KV cache and with one."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class TimePerToken:
    """How many times longer the last point takes than the first, and at the last point uncached / cached."""

    uncached_growth: float
    cached_growth: float | None
    advantage: float | None


def draw_time_per_token(
    uncached: Mapping[int, float], cached: Mapping[int, float] | None = None
) -> tuple[Figure, TimePerToken]:
    """Draw measured seconds per token, by tokens of text so far; with `cached`, both on the same linear axes.

    Raises InvalidArgumentError for fewer than two lengths, or where the two were not measured at the same ones.
    """
    lengths = sorted(uncached)
    if len(lengths) < 2 or (cached is not None and sorted(cached) != lengths):
        raise InvalidArgumentError(f"uncached has the lengths {lengths}: give at least two, the same ones for cached.")
    first, last = lengths[0], lengths[-1]
    figure, ax = plt.subplots(figsize=(7.0, 3.9))
    _line(ax, uncached, "uncached", "no cache (baseline)" if cached else "no cache")
    if cached is None:
        ax.set_title("Without a cache, each token costs more than the one before")
    else:
        _line(ax, cached, "cached", "KV cache")
        ax.set_title("With a cache, the next token no longer pays for the whole text")
    style.label_axis(ax, "x", "text so far", unit="tokens", kind="tokens", ticks=lengths[-4:])
    style.label_axis(ax, "y", "time for one more token", kind="seconds")
    ax.set(xlim=(0, last * 1.3), ylim=(0, max(uncached.values()) * 1.22))
    cached_growth = cached[last] / cached[first] if cached is not None else None
    advantage = uncached[last] / cached[last] if cached is not None else None
    return figure, TimePerToken(uncached[last] / uncached[first], cached_growth, advantage)


def _line(ax: Axes, seconds: Mapping[int, float], concept: str, name: str) -> None:
    """Draw one line with its name and last value written at its end."""
    lengths = sorted(seconds)
    last = lengths[-1]
    colour = style.colour(concept)
    ax.plot(lengths, [seconds[n] for n in lengths], "o-", color=colour, gid=concept)
    text = f"{name}\n{style.format_seconds(seconds[last])}"
    ax.annotate(text, (last, seconds[last]), (8, 1), textcoords="offset points", va="bottom", size=10, color=colour)
