"""Loss curves of training runs: several of one's own side by side, and the one that is recorded in a file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class LossCurve:
    """One run: the training loss of each step and (steps done, loss) on held-out text, nats per token."""

    losses: Sequence[float]
    dev_losses: Sequence[tuple[int, float]]
    concept: str
    dashed: bool = False


def running_means(losses: Sequence[float], width: int) -> list[float]:
    """Return the mean of each `width` losses in a row: of those up to step `width`, up to the step after, and so on."""
    sums = np.cumsum([0.0, *losses])
    return [float(sums[end] - sums[end - width]) / width for end in range(width, len(losses) + 1)]


def draw_training_losses(ax: Axes, curves: Mapping[str, LossCurve], width: int) -> dict[str, float]:
    """Draw the training losses, each point the mean of `width` steps, and return each run's last; changes `ax`."""
    last = {}
    for name, curve in curves.items():
        means = running_means(curve.losses, width)
        ax.plot(range(width, len(curve.losses) + 1), means, **_look(name, curve))
        last[name] = means[-1]
    style.label_axis(ax, "x", f"training step; a point is the mean of {width}")
    style.label_axis(ax, "y", "training loss", unit="nats a token")
    ax.legend(loc="best")
    return last


def _look(name: str, curve: LossCurve) -> dict[str, Any]:
    return {"color": style.colour(curve.concept), "linestyle": "--" if curve.dashed else "-", "label": name}


@dataclass(frozen=True)
class CurvesData:
    """What the figure shows: for each run the last held-out loss, and how far it lies above the first run's."""

    final: dict[str, float]
    above_first: dict[str, float]


def draw_loss_curves(curves: Mapping[str, LossCurve], width: int = 10) -> tuple[Figure, CurvesData]:
    """Draw the training losses (means of `width` steps) beside each run's held-out loss less the first run's.

    Raises InvalidArgumentError unless all runs were evaluated after the same steps.
    """
    first = next(iter(curves.values()))
    steps = [step for step, _ in first.dev_losses]
    for name, curve in curves.items():
        if [step for step, _ in curve.dev_losses] != steps:
            raise InvalidArgumentError(f"curves[{name!r}] was evaluated after other steps than the first run.")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.9))
    draw_training_losses(left, curves, width)
    for name, curve in curves.items():
        above = [loss - base for (_, loss), (_, base) in zip(curve.dev_losses, first.dev_losses, strict=True)]
        right.plot(steps, above, marker="o", markersize=5, **_look(name, curve))
    style.label_axis(right, "x", "training step")
    style.label_axis(right, "y", f"held-out loss, above {next(iter(curves))}", unit="nats")
    bound = 1.25 * max(0.08, *(abs(value) for line in right.lines for value in line.get_ydata()))
    right.set_ylim(-bound, bound)
    final = {name: curve.dev_losses[-1][1] for name, curve in curves.items()}
    return figure, CurvesData(final, {name: loss - first.dev_losses[-1][1] for name, loss in final.items()})


@dataclass(frozen=True)
class RecordData:
    """What a training record says: losses on the validation text by model, nats per token, and the parameters."""

    validation: dict[str, float]
    parameters: int

    @property
    def lead(self) -> float:
        """By how many nats per token the model beats the better of the trigram models."""
        return min(loss for name, loss in self.validation.items() if "Kneser" in name) - self.validation["model"]


def draw_training_record(record: Mapping[str, Any], vocab_size: int) -> tuple[Figure, RecordData]:
    """Draw the curve in a `training.json` beside the losses on the validation text; returns figure and data."""
    curve, losses = record["curve"], record["losses_in_nats_per_token"]["validation"]
    validation = {
        "uniform guess": math.log(vocab_size),
        "Kneser-Ney trigrams": losses["kneser_ney"],
        "modified Kneser-Ney": losses["modified_kneser_ney"],
        "model": losses["model"],
    }
    data = RecordData(validation, record["parameters"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.9))
    every = curve["steps_per_entry"]
    left.plot(
        [every * (i + 1) for i in range(len(curve["train"]))],
        curve["train"],
        color=style.colour("bfloat16"),
        label="training text, with dropout",
    )
    left.plot(*zip(*curve["dev"], strict=True), "o-", color=style.colour("measured"), markersize=5, label="dev text")
    style.label_axis(left, "x", "training step")
    style.label_axis(left, "y", "loss", unit="nats a token")
    left.legend(loc="upper right")
    _bars(right, validation)
    sign = "beats" if data.lead > 0 else "does not beat"
    figure.suptitle(
        f"{data.parameters / 1e6:.1f} million weights: the model {sign} the trigrams",
        x=0.01,
        ha="left",
        fontsize=12,
        weight="bold",
    )
    return figure, data


def _bars(ax: Axes, validation: Mapping[str, float]) -> None:
    names = list(validation)
    for row, name in enumerate(names):
        value = validation[name]
        ax.barh(row, value, color=style.colour("measured" if name == "model" else "baseline"), height=0.62)
        ax.text(value + 0.1, row, f"{value:.2f}", va="center", size=10)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    style.label_axis(ax, "x", "loss on the validation text", unit="nats a token")
    ax.set_xlim(0, 1.18 * max(validation.values()))
    ax.grid(visible=False)
