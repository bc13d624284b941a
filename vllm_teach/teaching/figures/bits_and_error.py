"""Output error against bits: one line a method, or one a group size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_MARKS = ("o", "s", "^", "D", "v", "P")
_NAMES = {"rtn": "rounding to nearest", "gptq": "GPTQ", "awq": "AWQ"}
SCALE_BITS = 16


@dataclass(frozen=True)
class BitsAndError:
    """For each line, by name, its points (bits a weight, relative error of the output), from few bits to many."""

    lines: dict[str, tuple[tuple[float, float], ...]]

    def error(self, name: str, bits: float) -> float:
        """The error of one line at one of its numbers of bits."""
        return dict(self.lines[name])[bits]


def bits_a_weight(bits: int, group_size: int) -> float:
    """Return what a weight takes in all: its code, and its part of the group's float16 scale and `bits`-bit zero."""
    return bits + (SCALE_BITS + bits) / group_size


def bits_and_error(lines: Mapping[str, Sequence[tuple[float, float]]]) -> BitsAndError:
    """Return the lines; raises InvalidArgumentError for an error that a logarithm cannot show."""
    for name, points in lines.items():
        if not points or min(error for _, error in points) <= 0:
            raise InvalidArgumentError(f"lines[{name!r}] has no points, or an error of 0: give errors above 0.")
    return BitsAndError({name: tuple(sorted(points)) for name, points in lines.items()})


def draw_bits_and_error(ax: Axes, data: BitsAndError, label: str) -> None:
    """Draw a line for each name, in the method's colour where the name is one, else in greys. Changes `ax`."""
    for number, (name, points) in enumerate(data.lines.items()):
        line = style.colour(name) if name in _NAMES else style.tint(style.colour("rtn"), 1 - 0.22 * number)
        bits, errors = zip(*points, strict=True)
        percent = [100 * error for error in errors]
        ax.plot(bits, percent, marker=_MARKS[number % 6], color=line, label=_NAMES.get(name, name))
    style.label_axis(ax, "x", label)
    style.label_axis(ax, "y", "output error", unit="%", log=10)
