"""One decoder layer over two ranks: which part of each matrix a rank has, and where the ranks must talk."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import Arrow, Box, draw_arrow, draw_box, page, route

_W, _H = 8.4, 2.9


@dataclass(frozen=True)
class RankLayer:
    """The drawing as data: boxes named "part/rank", the arrows between them, and how many all-reduces a layer has."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    all_reduces: int


def rank_layer(heads: tuple[int, int], columns: tuple[int, int]) -> RankLayer:
    """Return the drawing for two ranks with so many query heads, and so many columns of the MLP, each."""
    rows = (1.52, 0.52)
    boxes, arrows = [], []
    names = ("q, k, v", "o", "gate, up", "down")
    xs, width, height = (0.95, 2.35, 4.55, 5.95), 1.15, 0.72
    for rank, y in enumerate(rows):
        captions = (
            f"{heads[rank]} query heads",
            f"rows of {heads[rank]} heads",
            f"{columns[rank]} columns",
            f"{columns[rank]} rows",
        )
        made = [
            Box(f"{name}/{rank}", name, caption, x, y, width, height)
            for name, caption, x in zip(names, captions, xs, strict=True)
        ]
        boxes += made
        arrows += [route(made[0], "right", made[1], "left"), route(made[2], "right", made[3], "left")]
    sums = [
        Box(f"sum/{number}", "+", "", x, rows[1], 0.3, rows[0] + height - rows[1], "here")
        for number, x in enumerate((3.85, 7.45))
    ]
    for total, before, after in ((sums[0], "o", "gate, up"), (sums[1], "down", None)):
        for rank, y in enumerate(rows):
            at = (y + height / 2 - rows[1]) / total.h
            by_name = {box.name: box for box in boxes}
            arrows.append(route(by_name[f"{before}/{rank}"], "right", total, "left", at=(0.5, at)))
            if after is not None:
                arrows.append(route(total, "right", by_name[f"{after}/{rank}"], "left", at=(at, 0.5)))
    return RankLayer((*boxes, *sums), tuple(arrows), len(sums))


def draw_rank_layer(data: RankLayer, *, title: str) -> Figure:
    """Draw it, a row for each rank; the yellow boxes are the all-reduces."""
    figure, axes = page(_W, _H, title)
    for arrow in data.arrows:
        draw_arrow(axes, arrow)
    for box in data.boxes:
        draw_box(axes, box)
    for rank, y in enumerate((1.52, 0.52)):
        axes.text(0.12, y + 0.36, f"rank {rank}", size=11, va="center", weight="bold", color=style.INK)
    for x in (4.0, 7.6):
        axes.text(x, 0.3, "all-reduce", size=9.5, ha="center", va="center", color=style.INK)
    return figure
