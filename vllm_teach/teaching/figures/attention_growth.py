"""How a cost grows with the sequence length, one line per implementation, with the slope of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import log_log_slope
from vllm_teach.teaching import style

_MARKERS = {"naive": "o", "tiled": "s", "sdpa": "^", "memory_efficient": "D"}


@dataclass(frozen=True)
class Growth:
    """Costs at each length: implementation -> one number per length."""

    lengths: tuple[int, ...]
    costs: dict[str, tuple[float, ...]]

    def slope(self, name: str) -> float:
        """The slope between the last two lengths, log against log: 1 is linear, 2 quadratic."""
        return log_log_slope(self.lengths[-2:], self.costs[name][-2:])

    def per_token(self, name: str) -> float:
        """What each further token costs between the last two lengths."""
        first, last = self.costs[name][-2:]
        return (last - first) / (self.lengths[-1] - self.lengths[-2])

    def ratio(self, baseline: str, name: str) -> float:
        """How many times less `name` costs than `baseline` at the largest length."""
        return self.costs[baseline][-1] / self.costs[name][-1]


def growth(lengths: Sequence[int], costs: Mapping[str, Sequence[float]]) -> Growth:
    """Collect costs; raises InvalidArgumentError for fewer than two lengths or a list of another size."""
    if len(lengths) < 2:
        raise InvalidArgumentError(f"lengths has {len(lengths)} entries; a slope needs at least two.")
    for name, values in costs.items():
        if len(values) != len(lengths):
            raise InvalidArgumentError(
                f"costs[{name!r}] has {len(values)} entries and lengths {len(lengths)}: give one cost per length."
            )
    return Growth(tuple(lengths), {name: tuple(values) for name, values in costs.items()})


def draw_growth(ax: Axes, data: Growth, what: str, kind: style.Kind) -> None:
    """Draw the lines, both axes logarithmic, each with its name in the legend; changes `ax`.

    `what` labels the y axis ("peak extra memory") and `kind` formats its ticks ("bytes" or "seconds").
    """
    for name, values in data.costs.items():
        ax.plot(data.lengths, values, f"{_MARKERS.get(name, 'o')}-", color=style.colour(name), label=name)
    style.label_axis(ax, "x", "sequence length n", unit="tokens", kind="tokens", log=2, ticks=data.lengths)
    style.label_axis(ax, "y", what, kind=kind, log=2 if kind == "bytes" else 10)
    ax.legend(loc="upper left")
