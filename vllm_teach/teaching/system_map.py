"""The map of the system: the way of a request through the engine, with the room of this lesson highlighted.

The same picture opens every lesson. It is drawn from the data below, which tests check for overlaps and missing rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import Arrow, Box, draw_arrow, draw_box, find, page, route
from vllm_teach.teaching.figures.lesson_map import LESSONS, Lesson, LessonMap, draw_lesson_map

__all__ = [
    "LESSONS",
    "ROOMS",
    "Lesson",
    "LessonMap",
    "SystemMap",
    "draw_lesson_map",
    "draw_system_map",
    "system_map",
]

_W, _H = 8.4, 4.2  # the page, inches
_BOX_W, _BOX_H = 1.34, 0.62
_COLUMNS = tuple(0.12 + i * 1.705 for i in range(5))
_ROWS = (3.15, 2.02, 1.12, 0.14)  # lower edges: the way in and out, the engine's two rows, the rooms beneath

# Which packages of vllm_teach live in each place of the map.
ROOMS: dict[str, tuple[str, ...]] = {
    "server": ("serving",),
    "request": ("cli", "engine.request", "engine.sampling_params"),
    "tokenizer": ("models.tokenizer",),
    "scheduler": ("engine.scheduler",),
    "kv_cache": ("kvcache",),
    "model_runner": ("engine.model_runner", "models", "parallel"),
    "attention": ("attention", "backends"),
    "sampler": ("engine.sampler",),
    "quantization": ("quantization",),
    "detokenizer": ("engine.detokenizer",),
    "output": ("engine.outputs",),
    "metrics": ("serving.metrics",),
    "kernels": ("kernels",),
    "measuring": ("counters", "performance", "training", "validation", "teaching"),
}


@dataclass(frozen=True)
class SystemMap:
    """The drawn map as data: boxes, arrows, highlighted names, the engine's frame (x, y, w, h), the page; inches."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    highlighted: tuple[str, ...]
    frame: tuple[float, float, float, float]
    size: tuple[float, float]

    @property
    def title(self) -> str:
        """The picture's message: where in the system the lesson is."""
        here = " and ".join(find(self.boxes, name).title for name in self.highlighted)
        return f"You are here: {here}" if here else "The way of a request through the engine"


def _boxes() -> tuple[Box, ...]:
    c, (r0, r1, r2, r3) = _COLUMNS, _ROWS

    def box(name: str, title: str, caption: str, x: float, y: float, columns: int = 1) -> Box:
        width = _BOX_W + (columns - 1) * (c[1] - c[0])
        return Box(name, title, caption, x, y, width, _BOX_H)

    return (
        box("request", "request", "prompt, sampling", c[0], r1),
        box("tokenizer", "tokenizer", "text to token ids", c[0], r2),
        box("scheduler", "scheduler", "who runs this step", c[1], r1),
        box("kv_cache", "KV cache", "keys, values so far", c[1], r2),
        box("model_runner", "model runner", "layer after layer", c[2], r1),
        box("attention", "attention", "one of the backends", c[2], r2),
        box("sampler", "sampler", "logits to a token", c[3], r1),
        box("quantization", "quantisation", "weights in 4 bits", c[3], r2),
        box("output", "output", "text, streamed", c[4], r1),
        box("detokenizer", "detokenizer", "token ids to text", c[4], r2),
        box("server", "server", "HTTP: many users, one engine", c[0], r0, columns=5),
        box("metrics", "metrics", "requests, latency, cache use", c[0], r3, columns=2),
        box("kernels", "kernels", "the inner loops", c[2], r3),
        box("measuring", "measuring", "counters, roofline, claims checked", c[3], r3, columns=2),
    )


def _arrows(boxes: tuple[Box, ...]) -> tuple[Arrow, ...]:
    b = {box.name: box for box in boxes}
    server_in = (b["request"].w / 2) / b["server"].w
    cache_on_metrics = (b["kv_cache"].x + b["kv_cache"].w / 2 - b["metrics"].x) / b["metrics"].w
    runner, weights = b["model_runner"], b["quantization"]
    return (
        route(b["server"], "bottom", b["request"], "top", at=(server_in, 0.5), quiet=True),
        route(b["request"], "bottom", b["tokenizer"], "top"),
        route(b["tokenizer"], "right", b["scheduler"], "left", at=(0.5, 0.35)),
        route(b["scheduler"], "bottom", b["kv_cache"], "top", both_ways=True),
        route(b["scheduler"], "right", b["model_runner"], "left"),
        route(b["model_runner"], "bottom", b["attention"], "top", both_ways=True),
        route(b["attention"], "left", b["kv_cache"], "right", both_ways=True),
        route(b["model_runner"], "right", b["sampler"], "left"),
        # One token is out, the next step begins: the loop that gives the engine its name.
        route(b["sampler"], "top", b["scheduler"], "top", via=_ROWS[1] + _BOX_H + 0.17),
        route(b["sampler"], "right", b["detokenizer"], "left", at=(0.35, 0.5)),
        route(b["detokenizer"], "top", b["output"], "bottom"),
        route(b["output"], "top", b["server"], "bottom", at=(0.5, 1 - server_in), quiet=True),
        route(weights, "top", runner, "bottom", at=(0.5, 0.85), quiet=True),
        route(b["kv_cache"], "bottom", b["metrics"], "top", at=(0.5, cache_on_metrics), quiet=True),
        route(b["kernels"], "top", b["attention"], "bottom", quiet=True),
    )


def system_map(highlight: str | Sequence[str] = ()) -> SystemMap:
    """Return the map as data: `highlight` names one place or several.

    Raises InvalidArgumentError for a place that is not on the map.
    """
    chosen = (highlight,) if isinstance(highlight, str) else tuple(highlight)
    boxes = _boxes()
    for name in chosen:
        find(boxes, name, "highlight")
    boxes = tuple(replace(box, look="here" if box.name in chosen else "room") for box in boxes)
    first, last = find(boxes, "kv_cache"), find(boxes, "sampler")
    pad = 0.14
    frame = (first.x - pad, first.y - pad, last.x + last.w - first.x + 2 * pad, last.y + last.h - first.y + pad + 0.3)
    return SystemMap(boxes, _arrows(boxes), chosen, frame, (_W, _H))


def draw_system_map(highlight: str | Sequence[str] = ()) -> tuple[Figure, SystemMap]:
    """Draw the way of a request through the engine, with the places in `highlight` marked; see `system_map`.

    Returns the figure (8.4 x 4.2 inches) and its data.
    """
    data = system_map(highlight)
    figure, axes = page(*data.size, title=data.title)
    x, y, w, h = data.frame
    axes.add_patch(
        FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.1", facecolor="#F6F8FA", edgecolor="#C2CDD6", zorder=0
        )
    )
    for arrow in data.arrows:
        draw_arrow(axes, arrow)
    for box in data.boxes:
        draw_box(axes, box)
    loop = next(arrow for arrow in data.arrows if (arrow.source, arrow.target) == ("sampler", "scheduler"))
    axes.text(
        x + w / 2,
        loop.points[1][1],
        "the engine: one step, one token more",
        size=9,
        ha="center",
        va="center",
        color=style.INK,
        bbox={"facecolor": "#F6F8FA", "edgecolor": "none", "pad": 2},
        zorder=2,
    )
    return figure, data
