"""Four ways to a variance in float32, and what is left of it when a row lies far from 0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from vllm_teach.teaching import style

Row = np.ndarray  # float32 [size]


def sum_of_squares(row: Row) -> np.float32:
    """Return mean(x^2) - mean(x)^2 from two sums, added in order, as one pass would: float32 throughout."""
    size = np.float32(len(row))
    mean = _sum(row) / size
    return _sum(row * row) / size - mean * mean


def two_passes(row: Row) -> np.float32:
    """Return mean((x - mean)^2): the mean first, then the squares of what is left."""
    size = np.float32(len(row))
    centred = row - _sum(row) / size
    return _sum(centred * centred) / size


def from_the_first(row: Row) -> np.float32:
    """Return the same of the row less its first number, which is near the mean when the spread is small beside it."""
    return two_passes(row - row[0])


def welford(row: Row) -> np.float32:
    """Return the variance from a mean that is corrected with each number (Welford 1962): one pass, no cancellation."""
    mean = squares = np.float32(0)
    for count, x in enumerate(row, start=1):
        delta = x - mean
        mean += delta / np.float32(count)
        squares += delta * (x - mean)
    return squares / np.float32(len(row))


def _sum(numbers: Row) -> np.float32:
    return np.cumsum(numbers, dtype=np.float32)[-1]  # one after the other: the same on every machine


WAYS: dict[str, Callable[[Row], np.float32]] = {
    "mean of squares − square of mean": sum_of_squares,
    "Welford": welford,
    "two passes": two_passes,
    "two passes, first number subtracted": from_the_first,
}
_LOOKS = {  # the colour's concept and the marker
    "mean of squares − square of mean": ("naive", "^"),
    "Welford": ("sdpa", "s"),
    "two passes": ("memory_efficient", "D"),
    "two passes, first number subtracted": ("tiled", "o"),
}


@dataclass(frozen=True)
class VarianceError:
    """`error[way][i]` is the relative error of the variance at `distances[i]`, a row's mean in units of its spread.

    `negative[way]` are the distances at which the variance came out below 0.
    """

    distances: tuple[float, ...]
    error: dict[str, tuple[float, ...]]
    negative: dict[str, tuple[float, ...]]


def variance_error(distances: Sequence[float], size: int = 576, seed: int = 0) -> VarianceError:
    """Measure each of WAYS on a row of `size` normal numbers, moved so that its mean is `distance` standard deviations.

    The oracle is float64, of the numbers as float32 holds them.
    """
    drawn = np.random.default_rng(seed).standard_normal(size)
    error: dict[str, list[float]] = {way: [] for way in WAYS}
    negative: dict[str, list[float]] = {way: [] for way in WAYS}
    for distance in distances:
        row = (drawn + distance).astype(np.float32)
        exact = float(row.astype(np.float64).var())
        for way, variance in WAYS.items():
            found = float(variance(row))
            error[way].append(abs(found - exact) / exact)
            if found < 0:
                negative[way].append(distance)
    return VarianceError(
        tuple(distances),
        {way: tuple(values) for way, values in error.items()},
        {way: tuple(values) for way, values in negative.items()},
    )


def draw_variance_error(ax: Axes, data: VarianceError) -> VarianceError:
    """Draw the errors on `ax`, both axes logarithmic, and mark where a variance is negative. Returns `data`."""
    for way, errors in data.error.items():
        concept, marker = _LOOKS[way]
        shown = [min(max(value, 1e-9), 9e6) for value in errors]
        ax.plot(data.distances, shown, marker=marker, color=style.colour(concept), label=way)
        for distance in data.negative[way]:
            place = distance, shown[data.distances.index(distance)]
            ax.plot(*place, "o", markersize=14, fillstyle="none", color=style.INK)
    ax.axhline(1, color=style.colour("limit"), linewidth=1.5, linestyle="--")
    ax.text(data.distances[0], 1.7, "an error as large as the variance", size=10, color=style.colour("limit"))
    ax.plot([], [], "o", markersize=11, fillstyle="none", color=style.INK, label="below 0: the root is NaN")
    style.label_axis(ax, "x", "mean of the row, in standard deviations", log=10)
    style.label_axis(ax, "y", "relative error of the variance", log=10)
    ax.set_ylim(1e-9, 1e8)
    return data
