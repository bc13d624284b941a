"""FlashAttention's backward loop, one tile at a time: what is computed again, what is read, what is finished."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.attention.patterns import Causal
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.traffic import Span, cut, key_tile_pairs
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

# The page, in inches: the n x n matrix is a square of _SIDE whose upper left corner is (_LEFT, _TOP).
_PAGE = (8.4, 5.2)
_LEFT, _TOP, _SIDE = 2.12, 3.86, 2.7
_GAP = 0.1
_LINE = "#9A9A9A"


@dataclass(frozen=True)
class BackwardLoop:
    """The tiles (rows, keys) of one causal head in the order in which the backward pass visits them."""

    n: int
    tile: int
    head_dim: int
    visits: tuple[tuple[Span, Span], ...]

    @property
    def spans(self) -> list[Span]:
        """The tiles of one axis; both axes are cut alike."""
        return cut(self.n, self.tile)

    def rows_done(self, steps: int) -> dict[Span, tuple[int, int]]:
        """For each tile of queries, how many of its tiles have added to its dQ, and how many will."""
        return {
            span: (sum(rows == span for rows, _ in self.visits[:steps]), sum(rows == span for rows, _ in self.visits))
            for span in self.spans
        }

    def keys_done(self, steps: int) -> dict[Span, tuple[int, int]]:
        """The same for each tile of keys and its dK and dV."""
        return {
            span: (sum(keys == span for _, keys in self.visits[:steps]), sum(keys == span for _, keys in self.visits))
            for span in self.spans
        }

    def describe(self, steps: int) -> str:
        """Where the loop is, in one line."""
        (rows, keys), done = self.visits[steps - 1], sum(a == b for a, b in self.keys_done(steps).values())
        rows_done = sum(a == b for a, b in self.rows_done(steps).values())
        return (
            f"tile {steps} of {len(self.visits)}: queries {rows[0]} to {rows[1] - 1}, keys {keys[0]} to {keys[1] - 1}; "
            f"finished: dK and dV of {done} of {len(self.spans)} key tiles, dQ of {rows_done} of {len(self.spans)} "
            "query tiles"
        )


def backward_loop(n: int, tile: int, head_dim: int = 64) -> BackwardLoop:
    """Replay the package's own loop over one causal head of n queries and keys."""
    shape = AttentionShape(1, n, n, 1, 1, head_dim)
    visits = [(rows, keys) for keys, q_tiles in key_tile_pairs(shape, Causal(), tile, tile) for rows, _kind in q_tiles]
    return BackwardLoop(n, tile, head_dim, tuple(visits))


def draw_backward_tile(data: BackwardLoop, steps: int) -> Figure:
    """Draw the loop at its `steps`-th tile, from 1; InvalidArgumentError for a step that is not there.

    The matrix and the strips of Q, K, V and their gradients are to one scale; lse and D, one number a row, are drawn
    wider than they are.
    """
    if not 1 <= steps <= len(data.visits):
        raise InvalidArgumentError(f"steps={steps} is no step of this loop: use 1 to {len(data.visits)}.")
    figure, axes = page(*_PAGE, title="The backward pass computes P again, one tile at a time")
    rows, keys = data.visits[steps - 1]
    thin = _SIDE * data.head_dim / data.n
    _draw_matrix(axes, data, steps)
    x = _LEFT - 0.42
    for name, width in (("D", 0.06), ("lse", 0.06), ("dO", thin), ("Q", thin)):
        x -= width
        _strip(axes, data, name, (x, width), {rows: style.colour("tiled")}, down=True)
        x -= _GAP + (0.1 if width < thin else 0)
    counts = data.rows_done(steps)
    _strip(axes, data, "dQ", (_LEFT + _SIDE + _GAP, thin), _progress(counts), down=True, counts=counts)
    for name, y in (("K", _TOP + _GAP), ("V", _TOP + 2 * _GAP + thin)):
        _strip(axes, data, name, (y, thin), {keys: style.colour("tiled")}, down=False)
    counts = data.keys_done(steps)
    below = _TOP - _SIDE - 0.27
    for name, y in (("dK", below - thin), ("dV", below - 2 * thin - _GAP)):
        _strip(axes, data, name, (y, thin), _progress(counts), down=False, counts=counts)
    _explain(figure, axes, rows, keys)
    return figure


def _progress(done: dict[Span, tuple[int, int]]) -> dict[Span, str]:
    """Pending, in between (paler the less has been added), or finished."""
    return {
        span: style.tint(style.colour("written"), 0.25 + 0.45 * a / b) if a < b else style.colour("done")
        for span, (a, b) in done.items()
        if a
    }


def _at(data: BackwardLoop, index: float) -> float:
    """Inches from the matrix's upper left corner to a row or column."""
    return _SIDE * index / data.n


def _draw_matrix(axes: Axes, data: BackwardLoop, steps: int) -> None:
    visited, current = data.visits[:steps], data.visits[steps - 1]
    for rows in data.spans:
        for keys in data.spans:
            pair = rows, keys
            fill, hatch = style.colour("pending"), None
            if pair not in data.visits:
                fill, hatch = style.PAPER, "////"
            elif pair == current:
                fill = style.colour("current")
            elif pair in visited:
                fill = style.tint(style.colour("done"), 0.3)
            x, y = _LEFT + _at(data, keys[0]), _TOP - _at(data, rows[1])
            wide, high = _at(data, keys[1] - keys[0]), _at(data, rows[1] - rows[0])
            axes.add_patch(Rectangle((x, y), wide, high, facecolor=fill, edgecolor=_LINE, hatch=hatch, linewidth=0.8))
            if pair in data.visits:
                now = pair == current
                axes.text(
                    *(x + wide / 2, y + high / 2, str(data.visits.index(pair) + 1)),
                    ha="center",
                    va="center",
                    size=11,
                    weight="bold" if now else "normal",
                    color=style.INK if now else style.QUIET_INK,
                )
    for end in (0, *(end for _, end in data.spans)):
        axes.text(_LEFT - 0.07, _TOP - _at(data, end), f"{end}", ha="right", va="center", size=9)
        axes.text(_LEFT + _at(data, end), _TOP - _SIDE - 0.06, f"{end}", ha="center", va="top", size=9)


def _strip(
    axes: Axes,
    data: BackwardLoop,
    name: str,
    place: tuple[float, float],
    fills: dict[Span, str],
    *,
    down: bool,
    counts: dict[Span, tuple[int, int]] | None = None,
) -> None:
    """Draw a matrix of one row per query (`down`, place = x and width) or per key (place = y and height)."""
    start, thickness = place
    for span in data.spans:
        first, length = _at(data, span[0]), _at(data, span[1] - span[0])
        box = (start, _TOP - first - length, thickness, length) if down else (_LEFT + first, start, length, thickness)
        fill = fills.get(span, style.PAPER)
        axes.add_patch(Rectangle(box[:2], *box[2:], facecolor=fill, edgecolor=_LINE, linewidth=0.8, gid=name))
        if counts is not None:
            text = f"{counts[span][0]}/{counts[span][1]}"
            axes.text(box[0] + box[2] / 2, box[1] + box[3] / 2, text, size=9, ha="center", va="center")
    if down:
        axes.text(start + thickness / 2, _TOP + 0.07, name, size=10, ha="center", va="bottom")
    else:
        axes.text(_LEFT - 0.1, start + thickness / 2, name, size=10, ha="right", va="center")


def _explain(figure: Figure, axes: Axes, rows: Span, keys: Span) -> None:
    """Write the steps of a tile beside the drawing, and what the colours say."""
    left = _LEFT + _SIDE + 0.85
    axes.text(left, 4.72, f"queries {rows[0]} to {rows[1] - 1}\nkeys {keys[0]} to {keys[1] - 1}", size=10, va="top")
    formulas = (
        ("P", "= exp(Q Kᵀ · scale − lse)"),
        ("dV", "+= Pᵀ dO"),
        ("dP", "= dO Vᵀ"),
        ("dS", "= P · (dP − D)"),
        ("dQ", "+= dS K · scale"),
        ("dK", "+= dSᵀ Q · scale"),
    )
    for line, (name, formula) in enumerate(formulas):
        y = 4.1 - 0.235 * line
        axes.text(left, y, name, size=10, va="center")
        axes.text(left + 0.3, y, formula, size=10, va="center")
    legend = [
        Patch(facecolor=style.colour("current"), edgecolor=_LINE, label="P of this tile, now"),
        Patch(facecolor=style.tint(style.colour("done"), 0.3), edgecolor=_LINE, label="used and thrown away"),
        Patch(facecolor=style.colour("pending"), edgecolor=_LINE, label="still to come"),
        Patch(facecolor=style.PAPER, edgecolor=_LINE, hatch="////", label="hidden by the mask: never"),
        Patch(facecolor=style.colour("tiled"), edgecolor=_LINE, label="read for this tile"),
        Patch(facecolor=style.tint(style.colour("written"), 0.5), edgecolor=_LINE, label="added to (tiles so far)"),
        Patch(facecolor=style.colour("done"), edgecolor=_LINE, label="finished"),
    ]
    figure.legend(handles=legend, loc="upper left", bbox_to_anchor=(left / _PAGE[0] - 0.018, 0.50), fontsize=9.5)
