"""How a pattern changes a model's predictions along a text: perplexity by position, and relative to full attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

LABELS = {
    "causal": "full causal",
    "local_window": "window of 512",
    "sinks": "4 sinks + window",
    "block_sparse": "block-sparse, 256",
}


@dataclass(frozen=True, eq=False)
class PositionCurves:
    """Perplexity of each pattern over the `width` tokens that end at each of `positions`."""

    width: int
    positions: torch.Tensor
    perplexity: dict[str, torch.Tensor]

    def ratio(self, name: str) -> torch.Tensor:
        """The perplexity relative to that of full causal attention on the same tokens."""
        return self.perplexity[name] / self.perplexity["causal"]

    def ratio_between(self, name: str, first: int, last: int) -> float:
        """The mean ratio over the positions from `first` to before `last`."""
        chosen = (self.positions >= first) & (self.positions < last)
        return float(self.ratio(name)[chosen].mean())


def position_curves(nlls: Mapping[str, torch.Tensor], width: int = 128) -> PositionCurves:
    """Average -ln p over each run of `width` tokens and take its exp; `nlls` are those of tokens 1, 2, … of one text.

    Raises InvalidArgumentError without "causal", the baseline, and for texts of different lengths or below `width`.
    """
    lengths = {len(values) for values in nlls.values()}
    if "causal" not in nlls or len(lengths) != 1 or min(lengths) < width:
        raise InvalidArgumentError(
            f"nlls has {sorted(nlls)} of lengths {sorted(lengths)}; give 'causal' and others of one length, at least "
            f"{width}."
        )
    runs = {name: values.double().unfold(0, width, 1).mean(dim=1).exp() for name, values in nlls.items()}
    # nlls[i] belongs to token i + 1.
    positions = torch.arange(width, lengths.pop() + 1)
    return PositionCurves(width, positions, runs)


def draw_loss_by_position(data: PositionCurves, window: int, end: int) -> Figure:
    """Draw perplexity, above, and its ratio to full attention's, below, up to token `end`.

    A line stands at position `window`: from there on, token 0 lies outside the window.
    """
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8.4, 5.4), sharex=True, height_ratios=(1, 1))
    shown = data.positions < end
    for name in (name for name in LABELS if name in data.perplexity):
        look = {"color": style.colour(name), "linewidth": 2.4 if name == "causal" else 1.8}
        upper.plot(data.positions[shown], data.perplexity[name][shown], label=LABELS[name], **look)
        lower.plot(data.positions[shown], data.ratio(name)[shown], **look)
    highest = max(float(data.ratio(name)[shown].max()) for name in data.perplexity)
    lower.set_ylim(0.8, highest + 0.15)  # begins below 1, the baseline
    for ax in (upper, lower):
        ax.axvline(window, color=style.colour("limit"), linestyle=":", linewidth=1.5, zorder=1)
        ax.set_xlim(0, end)
    top = 1.2 * upper.get_ylim()[1]
    upper.set_ylim(0, top)
    upper.text(window - 12, 0.03 * top, "token 0 leaves the window", ha="right", size=10, color=style.colour("limit"))
    style.label_axis(upper, "y", "perplexity")
    style.label_axis(lower, "y", "relative to full", unit="ratio")
    style.label_axis(lower, "x", f"position in the text (each point: the {data.width} tokens up to it)", kind="tokens")
    legend = upper.legend(loc="upper left", ncols=4, columnspacing=1.2, frameon=True, framealpha=1)
    legend.get_frame().set_linewidth(0)
    return figure
