"""What sharing saves: blocks held with and without it over a run, and the share saved by number of sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.sharing import Sharing
from vllm_teach.teaching import style

# Kwon et al. 2023, section 6.3, Alpaca: 2, 4 and 6 sequences.
PAPER = {"beam search": (0.376, 0.552), "sampling": (0.061, 0.098)}
_LOOKS = {"beam search": ("o", "cpu"), "sampling": ("s", "memory_efficient")}


@dataclass(frozen=True)
class SavedBlocks:
    """The share of blocks saved, for each way to decode, with `counts` sequences a request."""

    counts: tuple[int, ...]
    saved: dict[str, tuple[float, ...]]


def saved_blocks(counts: Sequence[int], runs: Mapping[str, Sequence[Sharing]]) -> SavedBlocks:
    """Return the shares; raises InvalidArgumentError for a way to decode that has no name here, or too few runs."""
    for name, found in runs.items():
        if name not in _LOOKS or len(found) != len(counts):
            raise InvalidArgumentError(
                f"runs[{name!r}] has {len(found)} runs: use the names {', '.join(_LOOKS)}, and {len(counts)} runs each."
            )
    return SavedBlocks(tuple(counts), {name: tuple(one.saved for one in found) for name, found in runs.items()})


def draw_saved_blocks(ax: Axes, data: SavedBlocks) -> None:
    """Draw a line per way to decode, and the paper's range as a band of its colour. Changes `ax`."""
    for name, saved in data.saved.items():
        mark, concept = _LOOKS[name]
        low, high = PAPER[name]
        ax.axhspan(100 * low, 100 * high, color=style.tint(style.colour(concept), 0.18), zorder=0)
        ax.text(sum(data.counts[:2]) / 2, 100 * high + 1, f"the paper, {name}", ha="center", va="bottom", size=9)
        percent = [100 * share for share in saved]
        ax.plot(data.counts, percent, marker=mark, color=style.colour(concept), label=name)
    style.label_axis(ax, "x", "sequences a request", ticks=data.counts)
    style.label_axis(ax, "y", "blocks saved", unit="%")
    ax.set_ylim(0, 80)


def draw_blocks_held(ax: Axes, sharing: Sharing) -> None:
    """Draw the blocks of one run, step by step: without sharing, and held. Changes `ax`."""
    steps = range(1, len(sharing.held) + 1)
    ax.step(steps, sharing.listed, where="mid", color=style.colour("uncached"), label="without sharing")
    ax.step(steps, sharing.held, where="mid", color=style.colour("cached"), label="held")
    ax.fill_between(
        steps, sharing.held, sharing.listed, step="mid", color=style.tint(style.colour("saved"), 0.6), label="saved"
    )
    style.label_axis(ax, "x", "step")
    style.label_axis(ax, "y", "blocks", kind="tokens")
    ax.set_ylim(bottom=0)
