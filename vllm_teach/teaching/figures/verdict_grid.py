"""All verdicts of an audit at once: a row for each table, a square for each claim, a dot for each part of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.validation.audit.check import DIRECTION, FAILS, HOLDS, OPEN
from vllm_teach.validation.audit.run import RowAudit
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY, UNDECIDED

# The colour and the sign of each verdict; a part's outcome has the colour of the verdict that it speaks for.
LOOKS = {
    CONFIRMED: ("confirmed", "✓"),
    PARTLY: ("partly", "~"),
    CONTRADICTED: ("contradicted", "×"),
    UNDECIDED: ("undecided", "?"),
}
SPEAKS_FOR = {HOLDS: CONFIRMED, DIRECTION: PARTLY, FAILS: CONTRADICTED, OPEN: UNDECIDED}


@dataclass(frozen=True)
class Square:
    """One claim: its verdict, and the outcomes of its parts in the order of its checks."""

    verdict: str
    outcomes: tuple[str, ...]


def verdict_grid(rows: Sequence[RowAudit]) -> dict[str, tuple[Square, ...]]:
    """Return the squares of each table, in the order of the audit. Raises InvalidArgumentError for no rows."""
    if not rows:
        raise InvalidArgumentError("rows is empty: give the rows of an audit.")
    grid: dict[str, list[Square]] = {}
    for row in rows:
        outcomes = tuple(each.outcome for each in row.verdict.judgements)
        grid.setdefault(row.experiment.table_id, []).append(Square(row.verdict.verdict, outcomes))
    return {table: tuple(squares) for table, squares in grid.items()}


def verdict_colour(verdict: str) -> str:
    """Return the colour of one of VERDICTS."""
    return style.colour(LOOKS[verdict][0])


def draw_verdict_grid(grid: dict[str, tuple[Square, ...]], *, title: str) -> Figure:
    """Draw a row of squares for each table; beneath the sign of the verdict a dot for each part."""
    most = max(map(len, grid.values()))
    figure, ax = plt.subplots(figsize=(8.4, 0.36 * len(grid) + 1.3))
    for y, squares in enumerate(grid.values()):
        for x, square in enumerate(squares):
            fill = verdict_colour(square.verdict)
            ax.add_patch(Rectangle((x + 0.05, y + 0.06), 0.9, 0.88, facecolor=fill, edgecolor="none"))
            ink = style.ink_on(fill)
            sign = LOOKS[square.verdict][1]
            ax.text(x + 0.2, y + 0.52, sign, ha="center", va="center", size=12, weight="bold", color=ink)
            _draw_parts(ax, x, y, square.outcomes)
    ax.set(xlim=(0, max(most, 8)), ylim=(len(grid), 0))
    ax.set_yticks([y + 0.5 for y in range(len(grid))], list(grid))
    ax.set_xticks([x + 0.5 for x in range(most)], [str(x + 1) for x in range(most)])
    ax.tick_params(length=0)
    ax.set_xlabel("claim of the table; a dot for each part of it")
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=verdict_colour(each)) for each in LOOKS]
    labels = [f"{sign} {verdict}" for verdict, (_, sign) in LOOKS.items()]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=1.2)
    ax.set_title(title)
    return figure


def _draw_parts(ax: Axes, x: int, y: int, outcomes: Sequence[str]) -> None:
    """Draw the dots in up to two lines, on a white field that sets them off from the square."""
    ax.add_patch(Rectangle((x + 0.36, y + 0.14), 0.54, 0.72, facecolor=style.PAPER, edgecolor="none"))
    per_line = -(-len(outcomes) // (2 if len(outcomes) > 2 else 1))
    for index, outcome in enumerate(outcomes):
        line, place = divmod(index, per_line)
        lines = -(-len(outcomes) // per_line)
        centre = (x + 0.36 + 0.54 * (place + 0.5) / per_line, y + 0.14 + 0.72 * (line + 0.5) / lines)
        fill = verdict_colour(SPEAKS_FOR[outcome])
        ax.plot(*centre, "o", markersize=7, markerfacecolor=fill, markeredgecolor=style.QUIET_INK, markeredgewidth=0.6)
