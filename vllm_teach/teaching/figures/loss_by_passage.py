"""What a model still knows of what it has read: the loss on passages that a text repeats, by pattern."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.loss_by_position import LABELS

Span = tuple[int, int]  # first token, and one past the last


@dataclass(frozen=True)
class PassageLoss:
    """Mean -ln p per token, in nats: of each passage when it is read first, and at its repetition by pattern."""

    first: dict[str, float]
    again: dict[str, dict[str, float]]  # passage -> pattern -> loss


def passage_loss(nlls: Mapping[str, torch.Tensor], passages: Mapping[str, tuple[Span, Span]]) -> PassageLoss:
    """Average over the tokens of each passage, without its first one, which does not tell yet what follows.

    `nlls` are those of tokens 1, 2, … of one text, by pattern, "causal" among them; `passages` says where each passage
    stands first and where it is repeated.
    """

    def mean(values: torch.Tensor, span: Span) -> float:
        return float(values[span[0] : span[1] - 1].mean())  # token t has the index t - 1

    return PassageLoss(
        first={name: mean(nlls["causal"], before) for name, (before, _) in passages.items()},
        again={name: {of: mean(v, after) for of, v in nlls.items()} for name, (_, after) in passages.items()},
    )


def draw_passage_loss(ax: Axes, data: PassageLoss) -> None:
    """Draw a group of bars for each passage: the first reading, then its repetition under each pattern."""
    bars = ["first", *(name for name in LABELS if name in next(iter(data.again.values())))]
    width = 0.8 / len(bars)
    centres = np.arange(len(data.first))
    for place, name in enumerate(bars):
        first = name == "first"
        heights = [data.first[p] if first else data.again[p][name] for p in data.first]
        x = centres + (place - (len(bars) - 1) / 2) * width
        colour = style.colour("baseline") if first else style.colour(name)
        label = "first reading" if first else f"repeated, {LABELS[name]}"
        ax.bar(x, heights, 0.9 * width, color=colour, label=label, zorder=2)
        for left, height in zip(x, heights, strict=True):
            ax.text(left, height + 0.06, f"{height:.1f}", ha="center", va="bottom", size=10)
    ax.set_xticks(centres, list(data.first))
    highest = max(*data.first.values(), *(loss for losses in data.again.values() for loss in losses.values()))
    ax.set_ylim(0, 1.12 * highest)
    style.label_axis(ax, "y", "loss", unit="nats per token")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    ax.grid(axis="x", visible=False)
