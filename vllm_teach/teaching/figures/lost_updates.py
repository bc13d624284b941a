"""How many of a model's weights an update leaves exactly as they were, because the dtype rounds it away."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.softmax_precision import DTYPES

_MARKERS = {"float16": "o", "bfloat16": "s", "float32": "^"}


@dataclass(frozen=True)
class LostUpdates:
    """For each dtype, the share of weights that an update of each size leaves unchanged."""

    updates: tuple[float, ...]
    share: dict[str, tuple[float, ...]]


def lost_updates(weights: Iterable[torch.Tensor], updates: Sequence[float]) -> LostUpdates:
    """Add each update to every weight and subtract it, in each dtype, and count the sums that are the weight still.

    The weights are rounded to the dtype first. AdamW moves a weight by about its learning rate, up or down, whatever
    the gradient's size, so `updates` can be read as learning rates.
    """
    flat = torch.cat([weight.detach().flatten().float() for weight in weights])
    share: dict[str, tuple[float, ...]] = {}
    for name, dtype in DTYPES.items():
        rounded = flat.to(dtype)
        lost = []
        for size in updates:
            # The update stays in float32: what is tested is the dtype in which the weight is kept.
            moved = [(rounded.float() + sign * size).to(dtype) for sign in (1, -1)]
            lost.append(sum(float((new == rounded).double().mean()) for new in moved) / 2)
        share[name] = tuple(lost)
    return LostUpdates(tuple(updates), share)


def draw_lost_updates(ax: Axes, data: LostUpdates) -> None:
    """Draw the shares against the size of the update (logarithmic), a line per dtype; changes `ax`."""
    for name, shares in data.share.items():
        ax.plot(
            data.updates,
            [100 * share for share in shares],
            f"{_MARKERS[name]}-",
            color=style.colour(name),
            label=f"weights in {name}",
        )
    style.label_axis(ax, "x", "size of the update: about the learning rate", log=10)
    style.label_axis(ax, "y", "weights that do not change", unit="%")
    ax.set_ylim(-3, 103)
    ax.legend(loc="upper right")
