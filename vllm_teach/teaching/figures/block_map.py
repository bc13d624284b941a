"""Which sequence held which block of the KV cache in which step, to scale: a row for each block, a column a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vllm_teach.engine.block_history import block_history
from vllm_teach.engine.events import LogEntry
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_SHARED = style.QUIET_INK


@dataclass(frozen=True)
class BlockMap:
    """`holders[i][b]`: the sequences that held physical block b while step `steps[i]` was computed, none: ().

    `names` has the sequences' labels, in order of first appearance.
    """

    steps: tuple[int, ...]
    num_blocks: int
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    names: dict[int, str]

    @property
    def num_held(self) -> tuple[int, ...]:
        """Blocks held in each step."""
        return tuple(sum(bool(block) for block in step) for step in self.holders)

    @property
    def num_shared(self) -> tuple[int, ...]:
        """Blocks held by more than one sequence in each step."""
        return tuple(sum(len(block) > 1 for block in step) for step in self.holders)


def block_map(log: Iterable[LogEntry], num_blocks: int, names: Mapping[int, str] | None = None) -> BlockMap:
    """Read the map of a cache of `num_blocks` blocks from an engine's events; `names` labels sequences by id.

    Raises InvalidArgumentError when a block beyond `num_blocks` occurs, and for a log without a step.
    """
    history = [held for held in block_history(log) if held.computing]
    if not history:
        raise InvalidArgumentError("log has no step that was planned: let the engine make one first.")
    highest = max((block for held in history for block in held.holders), default=0)
    if highest >= num_blocks:
        raise InvalidArgumentError(f"num_blocks={num_blocks} is too few: block {highest} was held.")
    seen = dict.fromkeys(seq_id for held in history for block in held.holders.values() for seq_id in block)
    return BlockMap(
        tuple(held.step for held in history),
        num_blocks,
        tuple(tuple(held.holders.get(block, ()) for block in range(num_blocks)) for held in history),
        {seq_id: (names or {}).get(seq_id, f"sequence {seq_id}") for seq_id in sorted(seen)},
    )


def draw_block_map(
    data: BlockMap, ax: Axes | None = None, *, title: str = "Blocks are taken when tokens need them, anywhere"
) -> Figure:
    """Draw the map; sequences with the same label have one colour, and a dot marks a block that several hold.

    After eight labels the colours repeat, and there is no legend. Returns the figure; changes `ax` if it is given.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(8.4, 1.6 + min(3.6, max(1.4, 0.16 * data.num_blocks))))
    labels = list(dict.fromkeys(data.names.values()))
    fills = {seq_id: style.sequence_fill(labels.index(name)) for seq_id, name in data.names.items()}
    ax.imshow(_picture(data, fills), aspect="auto", interpolation="nearest", extent=_extent(data), zorder=1)
    shared = [
        (step, block)
        for step, blocks in zip(data.steps, data.holders, strict=True)
        for block, seq_ids in enumerate(blocks)
        if len(seq_ids) > 1
    ]
    if shared:
        size = 9 if len(data.steps) * data.num_blocks < 2500 else 2
        at_steps, at_blocks = zip(*shared, strict=True)
        ax.scatter(at_steps, at_blocks, s=size, color=_SHARED, linewidths=0, label="shared", zorder=2)
    ax.set(xlabel="step", ylabel="physical block", title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    if len(labels) <= len(style.SEQUENCE_FILLS):
        handles: list[object] = [Patch(color=style.sequence_fill(i), label=name) for i, name in enumerate(labels)]
        handles += ax.get_legend_handles_labels()[0]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0)
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def _extent(data: BlockMap) -> tuple[float, float, float, float]:
    """A cell is centred on its step and block; block 0 is at the top."""
    return data.steps[0] - 0.5, data.steps[-1] + 0.5, data.num_blocks - 0.5, -0.5


def _picture(data: BlockMap, fills: Mapping[int, str]) -> np.ndarray:
    """Return the colours `[blocks, steps, 3]`; a step that is missing in the log is white, as is a free block.

    A shared block has the colour of the first who holds it now.
    """
    picture = np.ones((data.num_blocks, data.steps[-1] - data.steps[0] + 1, 3))
    for step, blocks in zip(data.steps, data.holders, strict=True):
        for block, seq_ids in enumerate(blocks):
            if seq_ids:
                picture[block, step - data.steps[0]] = to_rgb(fills[seq_ids[0]])
    return picture
