"""Grouped-query attention: which query head reads which key/value head."""

from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_STEP, _BOX_W, _BOX_H = 0.72, 0.56, 0.42
_LEFT = 1.25


@dataclass(frozen=True)
class GroupedHeads:
    """For each query head, the key/value head it reads; and how many query heads share one."""

    kv_head_of: tuple[int, ...]
    group: int


def grouped_heads(q_heads: int, kv_heads: int) -> GroupedHeads:
    """Return the assignment: query head h reads key/value head h // (q_heads // kv_heads).

    Raises InvalidArgumentError unless `q_heads` is a positive multiple of `kv_heads`.
    """
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise InvalidArgumentError(f"q_heads={q_heads} must be a positive multiple of kv_heads={kv_heads}.")
    group = q_heads // kv_heads
    return GroupedHeads(tuple(head // group for head in range(q_heads)), group)


def draw_grouped_heads(q_heads: int, kv_heads: int) -> tuple[Figure, GroupedHeads]:
    """Draw query heads above the key/value heads they read, one colour a group; returns figure and data."""
    data = grouped_heads(q_heads, kv_heads)
    width = _LEFT + q_heads * _STEP + 0.1
    figure, axes = page(
        width, 2.35, f"{q_heads} query heads read {kv_heads} key/value heads: the cache keeps {kv_heads} of each"
    )
    y_q, y_kv = 1.32, 0.22
    centres = [_LEFT + (head + 0.5) * _STEP for head in range(q_heads)]
    owners = [
        sum(centres[i] for i in range(q_heads) if data.kv_head_of[i] == kv) / data.group for kv in range(kv_heads)
    ]
    for head, kv in enumerate(data.kv_head_of):
        colour = style.sequence_fill(kv)
        axes.plot([centres[head], owners[kv]], [y_q, y_kv + _BOX_H], color="#8A8A8A", linewidth=1.3, zorder=1)
        _head(figure, centres[head], y_q, f"q{head}", colour)
    for kv, centre in enumerate(owners):
        _head(figure, centre, y_kv, f"k{kv}, v{kv}", style.sequence_fill(kv), _BOX_W * 1.6)
    axes.text(0.12, y_q + _BOX_H / 2, "queries,\ncomputed", size=10, va="center", linespacing=1.25)
    axes.text(0.12, y_kv + _BOX_H / 2, "keys, values,\ncached", size=10, va="center", linespacing=1.25)
    return figure, data


def _head(figure: Figure, x: float, y: float, name: str, fill: str, width: float = _BOX_W) -> None:
    (axes,) = figure.axes
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y),
            width,
            _BOX_H,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=fill,
            edgecolor=style.INK,
            linewidth=1.0,
            zorder=2,
        )
    )
    axes.text(x, y + _BOX_H / 2, name, ha="center", va="center", size=10.5, color=style.ink_on(fill), zorder=3)
