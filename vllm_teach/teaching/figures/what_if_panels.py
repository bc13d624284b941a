"""One question a panel: a setting's choices, and the one number that they change. Modelled."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class WhatIf:
    """`values` of what `measure` says, by name of the line and then for each of `choices` of `setting`.

    Raises InvalidArgumentError for a line that has not one value for each choice, for no line, and for more than two.
    """

    title: str
    setting: str
    choices: tuple[str, ...]
    measure: str
    values: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if not 1 <= len(self.values) <= len(_CONCEPTS):
            raise InvalidArgumentError(f"values has {len(self.values)} lines: give one or two.")
        for name, line in self.values.items():
            if len(line) != len(self.choices):
                raise InvalidArgumentError(
                    f"values[{name!r}] has {len(line)} numbers for {len(self.choices)} choices: give one for each."
                )

    def change(self, name: str | None = None) -> float:
        """Return the last choice's value over the first one's, of the line `name` or the first line."""
        line = next(iter(self.values.values())) if name is None else self.values[name]
        return line[-1] / line[0]


_CONCEPTS = ("measured", "baseline")


def draw_what_if(panels: Sequence[WhatIf], *, title: str, columns: int = 2) -> Figure:
    """Draw the panels in rows of `columns`; each has an axis of its own, from 0."""
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.0 * rows), squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(ax, panel)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure


def _draw_panel(ax: Axes, panel: WhatIf) -> None:
    width = 0.8 / len(panel.values)
    for number, ((name, line), concept) in enumerate(zip(panel.values.items(), _CONCEPTS, strict=False)):
        places = [place + (number - (len(panel.values) - 1) / 2) * width for place in range(len(line))]
        bars = ax.bar(places, line, width * 0.92, color=style.colour(concept), label=name)
        ax.bar_label(bars, [_short(value) for value in line], size=8.5, padding=1)
    ax.set_xticks(range(len(panel.choices)), panel.choices)
    ax.set_ylim(
        0, (1.12 if len(panel.values) == 1 else 1.35) * max(value for line in panel.values.values() for value in line)
    )
    ax.set_title(panel.title, size=11)
    ax.grid(visible=False, axis="x")
    style.label_axis(ax, "x", panel.setting)
    style.label_axis(ax, "y", panel.measure, kind="count")
    if len(panel.values) > 1:
        ax.legend(loc="upper right", ncols=2, fontsize=9, borderaxespad=0.1)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
