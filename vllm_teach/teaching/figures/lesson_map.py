"""The map of the lessons: what builds on what, what exists, what is planned."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import Arrow, Box, Side, draw_arrow, draw_box, page, route

_W, _H = 8.4, 5.0  # the page, inches
_BOX_W, _BOX_H = 1.4, 0.72
_COLUMN, _ROW = 1.69, 0.93


@dataclass(frozen=True)
class Lesson:
    """One lesson: its number as written ("03"), its title in one or two lines, and its place on the map's grid."""

    number: str
    title: str
    column: int
    row: int


LESSONS = (
    Lesson("00", "start here", 0, 1),
    Lesson("01", "naive\nattention", 1, 1),
    Lesson("02", "online softmax\nand tiling", 2, 1),
    Lesson("03", "recomputation\nand training", 3, 0),
    Lesson("04", "attention\npatterns", 3, 1),
    Lesson("05", "choosing\na backend", 3, 2),
    Lesson("06", "paged\nKV cache", 1, 3),
    Lesson("07", "sharing: copy-\non-write, prefix", 2, 4),
    Lesson("08", "scheduling", 2, 3),
    Lesson("09", "quantisation", 2, 0),
    Lesson("10", "custom\nkernels", 4, 2),
    Lesson("11", "serving and\nmonitoring", 3, 3),
    Lesson("12", "roofline and\nsimulation", 3, 4),
    Lesson("13", "reference\ntables audited", 4, 4),
)

# (earlier, later, side it leaves, side it enters): `later` builds on `earlier`.
_BUILDS_ON: tuple[tuple[str, str, Side, Side], ...] = (
    ("00", "01", "right", "left"),
    ("01", "02", "right", "left"),
    ("01", "09", "top", "left"),
    ("02", "03", "right", "left"),
    ("02", "04", "right", "left"),
    ("02", "05", "right", "left"),
    ("05", "10", "right", "left"),
    ("00", "06", "bottom", "left"),
    ("02", "06", "bottom", "top"),
    ("06", "07", "bottom", "left"),
    ("06", "08", "right", "left"),
    ("08", "11", "right", "left"),
    ("08", "12", "right", "left"),
    ("12", "13", "right", "left"),
)


@dataclass(frozen=True)
class LessonMap:
    """The drawn map as data: boxes named by lesson number and arrows, in inches, the numbers that exist, the page."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    available: tuple[str, ...]
    size: tuple[float, float]

    @property
    def title(self) -> str:
        """The picture's message: how much of the course exists."""
        count, total = len(self.available), len(self.boxes)
        return f"{count} of {total} lessons are here" + (", the others are planned" if count < total else "")

    def builds_on(self, number: str) -> tuple[str, ...]:
        """Return the lessons that lesson `number` builds on."""
        return tuple(arrow.source for arrow in self.arrows if arrow.target == number)


def lesson_map(available: Collection[str], here: str | None = None) -> LessonMap:
    """Return the map as data. `available` holds lesson numbers ("00") or notebook names ("00_start_here").

    `here` marks one lesson as the reader's place. Raises InvalidArgumentError for a lesson that is not planned.
    """
    known = [lesson.number for lesson in LESSONS]
    for name in (*available, *([here] if here is not None else [])):
        if name[:2] not in known:
            raise InvalidArgumentError(f"lesson {name!r} is not on the map: use a number from 00 to {known[-1]}.")
    exist = tuple(sorted({name[:2] for name in available}))
    boxes = {lesson.number: _box(lesson, "room" if lesson.number in exist else "planned") for lesson in LESSONS}
    arrows = tuple(
        route(boxes[first], leave, boxes[then], enter, quiet=then not in exist)
        for first, then, leave, enter in _BUILDS_ON
    )
    if here is not None:
        boxes[here[:2]] = replace(boxes[here[:2]], look="here")
    return LessonMap(tuple(boxes.values()), arrows, exist, (_W, _H))


def _box(lesson: Lesson, look: str) -> Box:
    x = 0.12 + lesson.column * _COLUMN
    y = _H - 0.38 - _BOX_H - lesson.row * _ROW
    return Box(lesson.number, lesson.number, lesson.title, x, y, _BOX_W, _BOX_H, look)


def draw_lesson_map(available: Collection[str], here: str | None = None) -> tuple[Figure, LessonMap]:
    """Draw the 14 lessons: those in `available` filled, the planned ones dashed, an arrow from each to what needs it.

    Returns the figure (8.4 x 5.0 inches) and its data; see `lesson_map` for the arguments.
    """
    data = lesson_map(available, here)
    figure, axes = page(*data.size, title=data.title)
    for arrow in data.arrows:
        draw_arrow(axes, arrow)
    for box in data.boxes:
        draw_box(axes, box, title_size=10.5, caption_size=9)
    _draw_legend(axes, with_here=here is not None)
    return figure, data


def _draw_legend(axes: Axes, with_here: bool) -> None:
    """Explain arrow and boxes in the empty lower left corner."""
    samples = [("you are here", "here")] if with_here else []
    samples += [("available", "room"), ("planned", "planned")]
    for row, (text, look) in enumerate(reversed(samples)):
        draw_box(axes, Box(text, text, "", 0.12, 0.1 + row * 0.33, 1.12, 0.27, look), title_size=9)
    y = 0.1 + len(samples) * 0.33 + 0.12
    draw_arrow(axes, Arrow("", "", ((0.12, y), (0.52, y))))
    axes.text(0.6, y, "is needed by", size=9, va="center", color=style.INK)
