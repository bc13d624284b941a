"""Hit rates of prefix caches against their size, or against the size of a block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_MARKS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True)
class HitRates:
    """For each cache, by name, its hit rate (0 to 1) at each of `sizes`; `ceiling`: that of a cache without limits."""

    sizes: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    ceiling: float

    def best(self, size: int) -> str:
        """The name of the first of the caches with the highest rate at one size."""
        place = self.sizes.index(size)
        return max(self.rates, key=lambda name: self.rates[name][place])

    def at(self, name: str, size: int) -> float:
        """The rate of one cache at one size."""
        return self.rates[name][self.sizes.index(size)]


def hit_rates(sizes: Sequence[int], rates: Mapping[str, Sequence[float]], ceiling: float) -> HitRates:
    """Return the lines; raises InvalidArgumentError for one of another length, or a rate above the ceiling."""
    for name, line in rates.items():
        if len(line) != len(sizes):
            raise InvalidArgumentError(f"rates[{name!r}] has {len(line)} values for {len(sizes)} sizes: give as many.")
        if max(line) > ceiling:
            raise InvalidArgumentError(f"rates[{name!r}] exceeds the ceiling {ceiling:.3f}: a cache cannot.")
    return HitRates(tuple(sizes), {name: tuple(line) for name, line in rates.items()}, ceiling)


def draw_hit_rates(ax: Axes, data: HitRates, label: str, unit: str) -> None:
    """Draw a line per cache and the ceiling; a name begins with its concept ("lru = fifo", "hash, 3,200 slots").

    A line whose concept came before is dashed. Changes `ax`.
    """
    seen: list[str] = []
    for mark, (name, rates) in zip(_MARKS, data.rates.items(), strict=False):
        concept = name.replace(",", " ").split()[0]
        dash = "--" if concept in seen else "-"
        seen.append(concept)
        percent = [100 * rate for rate in rates]
        ax.plot(data.sizes, percent, dash, marker=mark, color=style.colour(concept), label=name)
    ax.axhline(100 * data.ceiling, color=style.colour("unlimited"), linestyle=":", label="no limit, token by token")
    style.label_axis(ax, "x", label, unit=unit, kind="tokens", log=2, ticks=data.sizes)
    style.label_axis(ax, "y", "hit rate", unit="% of prompt tokens")
    ax.set_ylim(0, max(112 * data.ceiling, ax.get_ylim()[1]))  # a second panel may share the axis
