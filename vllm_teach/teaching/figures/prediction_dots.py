"""What steps took, and what one or more predictions said, on one axis of time."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

# A prediction's colour, marker and size, by its place in the mapping: where two agree, both are seen.
_LOOKS = (("baseline", "s", 11), ("limit", "D", 7), ("ideal", "x", 7))


def prediction_ratios(
    measured: Sequence[float], predictions: Mapping[str, Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    """Return measured / predicted of each step, by prediction: 1 is right, above 1 it was slower than predicted.

    Raises InvalidArgumentError for a prediction with another number of steps, and for more than three predictions.
    """
    if len(predictions) > len(_LOOKS):
        raise InvalidArgumentError(f"predictions has {len(predictions)} entries: draw at most {len(_LOOKS)}.")
    for name, values in predictions.items():
        if len(values) != len(measured):
            raise InvalidArgumentError(
                f"predictions[{name!r}] has {len(values)} steps and measured {len(measured)}: give one for each."
            )
    return {
        name: tuple(seen / told for seen, told in zip(measured, values, strict=True))
        for name, values in predictions.items()
    }


def draw_predictions(
    steps: Sequence[str], measured: Sequence[float], predictions: Mapping[str, Sequence[float]], *, title: str
) -> Figure:
    """Draw a row for each of `steps`: its measured seconds, and those of each prediction; the axis is logarithmic."""
    prediction_ratios(measured, predictions)  # refuses what does not fit together
    figure, ax = plt.subplots(figsize=(7.0, 1.5 + 0.42 * len(steps)))
    rows = range(len(steps))
    for row in rows:
        ends = [measured[row], *(each[row] for each in predictions.values())]
        ax.plot([min(ends), max(ends)], [row, row], color=style.colour("other"), linewidth=1, zorder=1)
    ax.plot(measured, rows, "o", color=style.colour("measured"), markersize=9, label="measured", zorder=2)
    for (name, values), (concept, marker, size) in zip(predictions.items(), _LOOKS, strict=False):
        ax.plot(values, rows, marker, color=style.colour(concept), markersize=size, label=name, zorder=3)
    ax.set_yticks(list(rows), steps)
    ax.set_ylim(len(steps) - 0.5, -0.5)
    style.label_axis(ax, "x", "time of the step", kind="seconds", log=10)
    figure.legend(loc="outside lower center", ncols=1 + len(predictions))
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
