"""A radix tree of computed prefixes, to scale: a node spans its tokens' positions, and its children lie behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.radix_tree import RadixNode
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_TALL, _ROW, _LEFT, _WIDE = 0.4, 0.82, 0.35, 8.0


@dataclass(frozen=True)
class TreeNode:
    """Tokens at positions `start` to `end` - 1, in row `row`; `parent` is the index of the node before it, or None.

    `locks` is how many running sequences end here: neither this node nor those before it are evicted.
    """

    row: int
    start: int
    end: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    locks: int
    parent: int | None


@dataclass(frozen=True)
class TreeView:
    """The nodes, parents before children; a node's first child lies in its own row, the others below."""

    nodes: tuple[TreeNode, ...]

    @property
    def num_rows(self) -> int:
        """Leaves, each with a row of its own."""
        return 1 + max((node.row for node in self.nodes), default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree: what would be computed and stored once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def length(self) -> int:
        """The position behind the longest text."""
        return max((node.end for node in self.nodes), default=0)


def view_tree(root: RadixNode) -> TreeView:
    """Look at the tree below `root`, a root or any node, which itself is left out."""
    nodes: list[TreeNode] = []
    rows = 0

    def look(node: RadixNode, parent: int | None) -> None:
        nonlocal rows
        for number, child in enumerate(node.children.values()):
            rows += number > 0
            place = len(nodes)
            locks = len(child.cursors)
            nodes.append(
                TreeNode(rows, child.start, child.end, tuple(child.tokens), tuple(child.blocks), locks, parent)
            )
            look(child, place)

    look(root, None)
    return TreeView(tuple(nodes))


def draw_tree(
    view: TreeView,
    decode: Callable[[Sequence[int]], str] | None = None,
    title: str = "A prefix that texts share is in the tree once",
) -> Figure:
    """Draw the tree; `decode` turns a node's tokens into the text in its box. Below each box stand its blocks.

    Raises InvalidArgumentError for a tree without a node.
    """
    if not view.nodes:
        raise InvalidArgumentError("view has no node: insert a prefix first.")
    height = 0.62 + view.num_rows * _ROW + 0.5
    figure, axes = page(_LEFT + _WIDE + 0.2, height, title)
    unit = _WIDE / view.length
    for node in view.nodes:
        y = height - 0.5 - (node.row + 1) * _ROW + (_ROW - _TALL)
        if node.parent is not None and view.nodes[node.parent].row != node.row:
            above = height - 0.5 - (view.nodes[node.parent].row + 1) * _ROW + (_ROW - _TALL)
            x = _LEFT + node.start * unit
            axes.plot([x, x], [above, y + _TALL], color=style.INK, linewidth=1.2, zorder=1)
        _draw_node(axes, node, y, unit, decode)
    _draw_scale(axes, view, unit)
    return figure


def _draw_node(
    axes: Axes, node: TreeNode, y: float, unit: float, decode: Callable[[Sequence[int]], str] | None
) -> None:
    x, width = _LEFT + node.start * unit, (node.end - node.start) * unit
    fill = style.colour("current" if node.locks else "done")
    axes.add_patch(
        Rectangle((x, y), width, _TALL, facecolor=fill, edgecolor=style.INK, linewidth=1.0, gid="node", zorder=2)
    )
    text = decode(node.tokens) if decode else f"{len(node.tokens)} tokens"
    fits = max(1, int(width / 0.083))
    shown = text if len(text) <= fits else text[: max(0, fits - 1)] + "…"
    axes.text(x + width / 2, y + _TALL / 2, shown, ha="center", va="center", size=9, zorder=3)
    blocks = "block " if len(node.blocks) == 1 else "blocks "
    below = blocks + ", ".join(map(str, node.blocks))
    if node.locks:
        below += f" · {node.locks} running"
    axes.text(x + 0.02, y - 0.05, below, ha="left", va="top", size=8, color=style.QUIET_INK)


def _draw_scale(axes: Axes, view: TreeView, unit: float) -> None:
    step = next(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 40) if view.length / size <= 16)
    for position in range(0, view.length + 1, step):
        x = _LEFT + position * unit
        axes.plot([x, x], [0.44, 0.5], color=style.QUIET_INK, linewidth=0.8)
        axes.text(x, 0.42, f"{position}", ha="center", va="top", size=8.5)
    axes.plot([_LEFT, _LEFT + _WIDE], [0.5, 0.5], color=style.QUIET_INK, linewidth=0.8)
    axes.text(_LEFT + _WIDE / 2, 0.06, "position (tokens); orange: a running sequence ends here", ha="center", size=9.5)
