"""Prompt tokens found in the prefix cache and prompt tokens computed, request by request."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class PrefixHits:
    """Of each request's prompt: tokens `cached`, which were found, and tokens `computed`."""

    cached: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Tokens found / tokens of all prompts."""
        return sum(self.cached) / (sum(self.cached) + sum(self.computed))


def prefix_hits(cached: Sequence[int], lengths: Sequence[int]) -> PrefixHits:
    """Return what was found and what was computed of prompts of these lengths.

    Raises InvalidArgumentError for lists of different lengths, for none, and where nothing was left to compute: the
    last token's logits are needed.
    """
    if len(cached) != len(lengths) or not lengths:
        raise InvalidArgumentError(f"cached has {len(cached)} entries, lengths {len(lengths)}: give as many, from one.")
    computed = tuple(length - found for found, length in zip(cached, lengths, strict=True))
    if min(computed) < 1:
        raise InvalidArgumentError(f"cached={list(cached)} leaves a prompt without a token to compute: cap the hit.")
    return PrefixHits(tuple(cached), computed)


def draw_prefix_hits(ax: Axes, data: PrefixHits, what: str = "request", *, in_vain: bool = False) -> None:
    """Draw a stacked bar a request: computed below, cached above. Changes `ax`.

    With `in_vain` the upper part is what was computed although an earlier request had computed it.
    """
    numbers = range(1, len(data.cached) + 1)
    names = ("new", "computed again") if in_vain else ("computed", "found in the cache")
    colours = ("cached", "uncached") if in_vain else ("uncached", "cached")
    below, above = map(style.colour, colours)
    ax.bar(numbers, data.computed, width=0.82, color=below, label=names[0])
    ax.bar(numbers, data.cached, width=0.82, bottom=data.computed, color=above, label=names[1])
    style.label_axis(ax, "x", what)
    style.label_axis(ax, "y", "prompt tokens", kind="tokens")
    ax.grid(visible=False, axis="x")
