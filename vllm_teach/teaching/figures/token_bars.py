"""The distribution over the next token: its top as bars, and what temperature does to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.token_strip import visible


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens (text, probability), most likely first, and what all other tokens have together."""

    tokens: tuple[tuple[str, float], ...]
    rest: float
    rest_count: int


def top_tokens(logits: Tensor, decode: Callable[[list[int]], str], top: int, temperature: float = 1.0) -> TopTokens:
    """Return the `top` most likely tokens after dividing `logits` `[vocab]` by `temperature`.

    `decode` turns a list of ids into text. Raises InvalidArgumentError for other shapes, a temperature that is not
    above zero, or a `top` that leaves no token for the rest.
    """
    if logits.ndim != 1 or not 1 <= top < logits.shape[0]:
        raise InvalidArgumentError(
            f"logits of shape {list(logits.shape)} with top={top}: give [vocab] and a smaller top."
        )
    if temperature <= 0:
        raise InvalidArgumentError(f"temperature={temperature} divides the logits: use a number above 0.")
    values, ids = (logits.double() / temperature).softmax(-1).topk(top)
    pairs = tuple((decode([token_id]), value) for token_id, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TopTokens(pairs, 1 - sum(value for _, value in pairs), logits.shape[0] - top)


def draw_next_token(logits: Tensor, decode: Callable[[list[int]], str], top: int = 5) -> tuple[Figure, TopTokens]:
    """Draw the probabilities of the `top` next tokens and of all others together; returns figure and data."""
    data = top_tokens(logits, decode, top)
    figure, ax = plt.subplots(figsize=(7.0, 0.42 * (top + 1) + 1.1))
    _bars(ax, data, style.sequence_fill(0))
    best, share = data.tokens[0]
    ax.set_title(f"The model's guess: \u201c{visible(best)}\u201d comes next with {_percent(share)}")
    return figure, data


def draw_temperatures(
    logits: Tensor, decode: Callable[[list[int]], str], temperatures: Sequence[float], top: int = 6
) -> tuple[Figure, dict[float, TopTokens]]:
    """Draw the same next-token distribution at several temperatures, one panel each, on one scale.

    The tokens and their order are the same in every panel: temperature never changes the ranking.
    """
    data = {t: top_tokens(logits, decode, top, t) for t in temperatures}
    figure, axes = plt.subplots(1, len(data), figsize=(8.4, 0.36 * (top + 1) + 1.35), sharex=True, sharey=True)
    for ax, (temperature, tokens) in zip(axes, data.items(), strict=True):
        is_one = temperature == 1
        _bars(ax, tokens, style.colour("baseline") if is_one else style.sequence_fill(0), room=1.34)
        ax.set_xticks([0, 0.5, 1])
        ax.set_title(f"temperature {temperature:g}" + (" (as is)" if is_one else ""), fontsize=11, weight="normal")
    figure.suptitle(
        "A low temperature sharpens the choice, a high one flattens it", x=0.01, ha="left", fontsize=12, weight="bold"
    )
    return figure, data


def _bars(ax: Axes, data: TopTokens, colour: str, room: float = 1.12) -> None:
    """Draw one bar a token, most likely on top, and a pale one for the rest; `room` leaves space for the numbers."""
    names = [visible(text) for text, _ in data.tokens] + [f"{data.rest_count:,} others"]
    values = [value for _, value in data.tokens] + [data.rest]
    rows = range(len(values))
    ax.barh(rows, values, height=0.68, color=[colour] * len(data.tokens) + [style.colour("other")])
    for row, value in zip(rows, values, strict=True):
        ax.annotate(_percent(value), (value, row), (4, 0), textcoords="offset points", va="center", size=10)
    ax.set_yticks(rows, names, family="DejaVu Sans Mono")
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.set_xlim(0, max(ax.get_xlim()[1], max(values) * room))
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ax.set_xlabel("probability")
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %") if value >= 0.0005 else "< 0.1 %"
