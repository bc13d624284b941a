"""Block tables at one moment: each sequence's logical blocks, the physical blocks they are, who shares, what is copied.

To scale: a cell is a block in both rows of pictures, and its fill is the share of its slots that hold tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_CELL, _TALL = 0.46, 0.36
_LEFT, _GAP = 1.25, 0.34
_EMPTY = "#F4F4F4"


@dataclass(frozen=True)
class LogicalBlock:
    """Logical block `index` of `sequence` is physical block `physical`; `filled` of its slots hold its tokens."""

    sequence: str
    index: int
    physical: int
    filled: int


@dataclass(frozen=True)
class TableView:
    """Tables at one moment. `references[b]`: how many tables hold physical block b. `copies`: (source, destination).

    Logical blocks that were given back are left out.
    """

    sequences: tuple[str, ...]
    logical: tuple[LogicalBlock, ...]
    references: tuple[int, ...]
    block_size: int
    copies: tuple[tuple[int, int], ...]

    def owner(self, physical: int) -> str | None:
        """The first sequence that holds a physical block."""
        return next((each.sequence for each in self.logical if each.physical == physical), None)

    def filled(self, physical: int) -> int:
        """The most tokens that anyone who holds a physical block has in it."""
        return max((each.filled for each in self.logical if each.physical == physical), default=0)


def view_tables(tables: Mapping[str, BlockTable], num_blocks: int, transfers: Iterable[Transfer] = ()) -> TableView:
    """Look at `tables`, by the sequences' names; the copies among `transfers` (a plan's) are the copy-on-write ones.

    Raises InvalidArgumentError without a table, for tables of several block sizes, and for a block beyond `num_blocks`.
    """
    sizes = {table.block_size for table in tables.values()}
    if len(sizes) != 1:
        raise InvalidArgumentError(f"tables have block sizes {sorted(sizes)}: give at least one, all of one size.")
    [size] = sizes
    references = [0] * num_blocks
    logical = []
    for name, table in tables.items():
        for index, block in enumerate(table.blocks):
            if block == NO_BLOCK:
                continue
            if block >= num_blocks:
                raise InvalidArgumentError(f"num_blocks={num_blocks} is too few: {name!r} holds block {block}.")
            references[block] += 1
            logical.append(LogicalBlock(name, index, block, min(size, table.num_tokens - index * size)))
    copies = tuple(pair for transfer in transfers if transfer.kind == "copy" for pair in transfer.pairs)
    return TableView(tuple(tables), tuple(logical), tuple(references), size, copies)


def draw_tables(view: TableView, title: str = "Logical blocks are in order, physical blocks lie anywhere") -> Figure:
    """Draw the tables above the physical blocks, with a line from each logical block to its physical one.

    A logical block says "index → physical block". The number in a physical block is its own, the one below it how many
    tables hold it; a thick border marks those that several hold.
    """
    widest = max((each.index + 1 for each in view.logical), default=1)
    width = _LEFT + max(widest, len(view.references)) * _CELL + 0.3
    rows = len(view.sequences)
    bottom = 0.92  # of the physical blocks
    lines = bottom + _TALL + 0.3 + 0.55  # where the lowest table begins
    figure, axes = page(width, lines + rows * (_TALL + _GAP) + 0.2, title)
    tops: dict[str, float] = {}
    for row, name in enumerate(view.sequences):
        tops[name] = lines + (rows - 1 - row) * (_TALL + _GAP)
        axes.text(_LEFT - 0.12, tops[name] + _TALL / 2, name, ha="right", va="center", size=10)
    for each in view.logical:
        x, share = _LEFT + each.index * _CELL, each.filled / view.block_size
        text = f"{each.index}→{each.physical}"
        _cell(axes, x, tops[each.sequence], _fill(view, each.sequence), share, text, 8.5)
        _line(axes, view, each, tops[each.sequence], bottom + _TALL)
    _draw_physical(axes, view, bottom)
    for pair in view.copies:
        _copy(axes, *pair, y=bottom)
    return figure


def _fill(view: TableView, name: str) -> str:
    return style.sequence_fill(view.sequences.index(name))


def _cell(axes: Axes, x: float, y: float, fill: str, share: float, text: str, size: float = 9.5) -> None:
    axes.add_patch(Rectangle((x, y), _CELL, _TALL, facecolor=_EMPTY, edgecolor="none", zorder=2))
    axes.add_patch(Rectangle((x, y), _CELL * share, _TALL, facecolor=fill, edgecolor="none", zorder=2.1))
    axes.add_patch(Rectangle((x, y), _CELL, _TALL, facecolor="none", edgecolor=style.INK, linewidth=0.9, zorder=2.2))
    axes.text(x + _CELL / 2, y + _TALL / 2, text, ha="center", va="center", size=size, zorder=3)


def _line(axes: Axes, view: TableView, each: LogicalBlock, y: float, to: float) -> None:
    """Each sequence's lines have a place of their own within the cells, so that none hides another."""
    place = (view.sequences.index(each.sequence) + 0.5) / len(view.sequences)
    start, end = _LEFT + (each.index + place) * _CELL, _LEFT + (each.physical + place) * _CELL
    axes.plot([start, end], [y, to], color=_fill(view, each.sequence), linewidth=1.8, zorder=1)


def _draw_physical(axes: Axes, view: TableView, y: float) -> None:
    axes.text(_LEFT - 0.12, y + _TALL / 2, "physical", ha="right", va="center", size=10, weight="bold")
    axes.text(_LEFT - 0.12, y - 0.16, "references", ha="right", va="center", size=9, color=style.QUIET_INK)
    for block, count in enumerate(view.references):
        x, owner = _LEFT + block * _CELL, view.owner(block)
        fill = _EMPTY if owner is None else _fill(view, owner)
        _cell(axes, x, y, fill, view.filled(block) / view.block_size, f"{block}")
        weight = "bold" if count > 1 else "normal"
        axes.text(x + _CELL / 2, y - 0.16, f"{count}", ha="center", va="center", size=9, weight=weight)
        if count > 1:  # a thick border: shared
            axes.add_patch(
                Rectangle((x + 0.02, y + 0.02), _CELL - 0.04, _TALL - 0.04, fill=False, linewidth=2.4, zorder=2.3)
            )


def _copy(axes: Axes, source: int, destination: int, y: float) -> None:
    """An arrow below the blocks, from what is copied to the copy."""
    start, end = (_LEFT + (block + 0.5) * _CELL for block in (source, destination))
    axes.add_patch(
        FancyArrowPatch(
            (start, y - 0.3),
            (end, y - 0.3),
            connectionstyle=f"arc3,rad={0.35 if end > start else -0.35}",
            arrowstyle="-|>",
            mutation_scale=12,
            color=style.colour("limit"),
            linewidth=1.6,
            zorder=4,
        )
    )
    label = {"ha": "left", "va": "center", "size": 9, "color": style.colour("limit")}
    axes.text(max(start, end) + 0.12, y - 0.42, "copy on write", **label)  # type: ignore[arg-type]
