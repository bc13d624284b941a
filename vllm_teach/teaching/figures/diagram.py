"""Boxes and arrows to scale: the parts that the system map and the lesson map are drawn from.

All lengths are inches on the page, so that a box drawn 1.4 wide is 1.4 inches wide, and text fits or visibly does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

Side = Literal["left", "right", "top", "bottom"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Look:
    """How a box is drawn: fill, border and text colours, and whether the border is dashed."""

    fill: str
    edge: str
    ink: str
    dashed: bool = False
    width: float = 1.2


LOOKS = {
    "here": Look(style.colour("here"), style.INK, style.INK, width=2.0),
    "room": Look(style.colour("room"), "#5B7C99", style.INK),
    "planned": Look(style.colour("planned"), "#9A9A9A", style.QUIET_INK, dashed=True),
}


@dataclass(frozen=True)
class Box:
    """A rectangle with a bold title and a smaller caption; (x, y) is the lower left corner, in inches."""

    name: str
    title: str
    caption: str
    x: float
    y: float
    w: float
    h: float
    look: str = "room"

    def anchor(self, side: Side, at: float = 0.5) -> Point:
        """Return the point on `side`, a fraction `at` along it from the left or the bottom."""
        if side in ("left", "right"):
            return (self.x if side == "left" else self.x + self.w, self.y + at * self.h)
        return (self.x + at * self.w, self.y if side == "bottom" else self.y + self.h)

    def overlaps(self, other: "Box") -> bool:
        """Say whether the two rectangles share area (touching borders do not)."""
        across = self.x < other.x + other.w and other.x < self.x + self.w
        return across and self.y < other.y + other.h and other.y < self.y + self.h


@dataclass(frozen=True)
class Arrow:
    """A line of right-angled turns from the border of one box to the border of another."""

    source: str
    target: str
    points: tuple[Point, ...]
    quiet: bool = False
    both_ways: bool = False


def route(
    source: Box,
    leave: Side,
    target: Box,
    enter: Side,
    *,
    at: tuple[float, float] = (0.5, 0.5),
    via: float | None = None,
    quiet: bool = False,
    both_ways: bool = False,
) -> Arrow:
    """Lay an arrow from a side of one box to a side of another, with at most two turns.

    `at` says where along the two sides it leaves and enters. Between parallel sides the middle stretch lies at the
    coordinate `via` (x between left/right sides, y between top/bottom sides), by default half way.
    """
    (x0, y0), (x1, y1) = source.anchor(leave, at[0]), target.anchor(enter, at[1])
    sideways, ends_sideways = leave in ("left", "right"), enter in ("left", "right")
    turns: list[Point]
    if sideways and ends_sideways:
        x = (x0 + x1) / 2 if via is None else via
        turns = [] if y0 == y1 and via is None else [(x, y0), (x, y1)]
    elif not sideways and not ends_sideways:
        y = (y0 + y1) / 2 if via is None else via
        turns = [] if x0 == x1 and via is None else [(x0, y), (x1, y)]
    else:
        turns = [(x1, y0) if sideways else (x0, y1)]
    return Arrow(source.name, target.name, ((x0, y0), *turns, (x1, y1)), quiet, both_ways)


def find(boxes: Iterable[Box], name: str, argument: str = "name") -> Box:
    """Return the box of that name; raises InvalidArgumentError that lists the names."""
    by_name = {box.name: box for box in boxes}
    if name not in by_name:
        raise InvalidArgumentError(f"{argument}={name!r} is not on the map: use one of {', '.join(by_name)}.")
    return by_name[name]


def page(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Return a figure of that size with a title at its top left, whose axes span it, one unit an inch."""
    figure = plt.figure(figsize=(width, height), layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    axes.text(0.12, height - 0.08, title, size=12, weight="bold", va="top", color=style.INK)
    return figure, axes


def draw_box(axes: Axes, box: Box, title_size: float = 10.5, caption_size: float = 8.5) -> None:
    """Draw one box with its texts centred; adds a patch and one or two texts to `axes`."""
    look = LOOKS[box.look]
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y),
            box.w,
            box.h,
            boxstyle="round,pad=0,rounding_size=0.07",
            facecolor=look.fill,
            edgecolor=look.edge,
            linewidth=look.width,
            linestyle=(0, (4, 2.5)) if look.dashed else "solid",
            gid=box.name,
            zorder=2,
        )
    )
    middle = box.x + box.w / 2
    text: dict[str, Any] = {"ha": "center", "color": look.ink, "zorder": 3, "gid": box.name, "linespacing": 1.15}
    if not box.caption:
        axes.text(middle, box.y + box.h / 2, box.title, size=title_size, weight="bold", va="center", **text)
        return
    line = 1.25 / 72
    title_height = (box.title.count("\n") + 1) * title_size * line
    caption_height = (box.caption.count("\n") + 1) * caption_size * line
    top = box.y + (box.h + title_height + caption_height) / 2
    axes.text(middle, top, box.title, size=title_size, weight="bold", va="top", **text)
    axes.text(middle, top - title_height, box.caption, size=caption_size, va="top", **text)


def draw_arrow(axes: Axes, arrow: Arrow) -> None:
    """Draw one arrow; adds a patch to `axes`."""
    axes.add_patch(
        FancyArrowPatch(
            path=Path(list(arrow.points)),
            arrowstyle="<|-|>" if arrow.both_ways else "-|>",
            mutation_scale=11,
            color="#9A9A9A" if arrow.quiet else "#33506B",
            linewidth=1.0 if arrow.quiet else 1.5,
            linestyle=(0, (3, 2)) if arrow.quiet else "solid",
            joinstyle="miter",
            capstyle="butt",
            zorder=1.5,
        )
    )
