"""Where one backend overtakes another as calls grow: the ratio of their times, and the length where it crosses 1."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_LOOKS = (("o-", "#4477AA"), ("s-", "#CCBB44"), ("^-", "#AA3377"))


@dataclass(frozen=True)
class Crossovers:
    """For each setting, the ratio `first` / `second` of the times at each length."""

    first: str
    second: str
    ratio: dict[str, dict[int, float]]

    def crossing(self, setting: str) -> float | None:
        """The length from which `second` is the faster one, interpolated; None when it never is, 0 when it always is.

        The last crossing counts. Between two lengths the logarithm of the ratio is taken to be linear in that of n.
        """
        points = sorted(self.ratio[setting].items())
        if points[-1][1] <= 1:
            return None
        for (low, below), (high, above) in reversed(list(pairwise(points))):
            if below <= 1 < above:
                return low * (high / low) ** (math.log(1 / below) / math.log(above / below))
        return 0.0

    def describe(self, setting: str) -> str:
        """The crossing in words."""
        found = self.crossing(setting)
        if found is None:
            return f"{self.first} stays ahead"
        return f"{self.second} is always ahead" if found == 0 else f"{self.second} is ahead from {found:,.0f} tokens on"


def crossovers(first: str, second: str, timed: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Crossovers:
    """Collect ratios from `timed[setting][length][backend]`, in seconds; lengths that lack one of the two are left out.

    Raises InvalidArgumentError for a setting with fewer than two lengths.
    """
    ratio = {}
    for setting, by_length in timed.items():
        found = {n: one[first] / one[second] for n, one in by_length.items() if first in one and second in one}
        if len(found) < 2:
            raise InvalidArgumentError(
                f"timed[{setting!r}] has both {first} and {second} at {len(found)} lengths; a crossing needs two."
            )
        ratio[setting] = found
    return Crossovers(first, second, ratio)


def draw_crossovers(ax: Axes, data: Crossovers, threshold: int | None = 1024) -> None:
    """Draw a line per setting, both axes logarithmic; 1 is where both are equally fast. Changes `ax`."""
    ax.axhline(1, color=style.colour("ideal"), linewidth=1.2)
    if threshold is not None:
        ax.axvline(threshold, color=style.colour("limit"), linestyle="--", label=f"the articles' {threshold:,}")
    for (setting, ratios), (look, ink) in zip(data.ratio.items(), _LOOKS, strict=False):
        ax.plot(list(ratios), list(ratios.values()), look, color=ink, label=setting)
        found = data.crossing(setting)
        if found:
            ax.plot([found], [1], "o", markersize=12, fillstyle="none", color=style.INK, zorder=4)
    lengths = sorted({n for ratios in data.ratio.values() for n in ratios})
    style.label_axis(ax, "x", "sequence length n", unit="tokens", kind="tokens", log=2, ticks=lengths)
    values = [value for ratios in data.ratio.values() for value in ratios.values()]
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if min(values) / 1.5 <= t <= max(values) * 1.5]
    style.label_axis(ax, "y", f"time of {data.first} over {data.second}", log=10, ticks=ticks)
    ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
