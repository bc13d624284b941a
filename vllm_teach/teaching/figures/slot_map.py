"""Every slot of a small KV cache at one step, to scale: whose it is, and whether a token is in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from vllm_teach.kvcache.occupancy import Memory, simulate_occupancy
from vllm_teach.kvcache.waste import Lengths
from vllm_teach.teaching import style

FREE = -1
_EMPTY = 0.3  # how much of its colour a slot keeps that is held and has no token


@dataclass(frozen=True)
class SlotMap:
    """`owners[s]`: the sequence that holds slot s, or FREE; `stored[s]`: whether a token is in it. `step` is from 1.

    `block_size` is None where a sequence holds one run. `num_left` are the requests that have not ended.
    """

    step: int
    owners: tuple[int, ...]
    stored: tuple[bool, ...]
    block_size: int | None
    num_left: int

    @property
    def in_flight(self) -> int:
        """Sequences in the cache."""
        return len(set(self.owners) - {FREE})

    @property
    def share_stored(self) -> float:
        """Slots with a token / all slots, 0 to 1."""
        return sum(self.stored) / len(self.stored)

    @property
    def share_held(self) -> float:
        """Slots that are someone's / all slots, 0 to 1."""
        return sum(owner != FREE for owner in self.owners) / len(self.owners)

    def describe(self) -> str:
        """Say the step's numbers in a few words."""
        return f"{self.in_flight} in flight, {self.share_held:.0%} of the slots held, {self.share_stored:.0%} used"


def slot_history(lengths: Lengths, memory: Memory, block_size: int | None = None) -> list[SlotMap]:
    """Run `simulate_occupancy` and return the map of each step."""
    history: list[SlotMap] = []
    ends = [sum(pair) for pair in lengths]

    def observe(running: Sequence[int], tokens: Sequence[int]) -> None:
        owners, stored = [FREE] * memory.num_slots, [False] * memory.num_slots
        for seq in running:
            slots = [slot for first, length in memory.runs_of(seq) for slot in range(first, first + length)]
            for place, slot in enumerate(slots):
                owners[slot], stored[slot] = seq, place < tokens[seq]
        left = sum(count < end for count, end in zip(tokens, ends, strict=True))
        history.append(SlotMap(len(history) + 1, tuple(owners), tuple(stored), block_size, left))

    simulate_occupancy(lengths, memory, observe)
    return history


def at_step(history: Sequence[SlotMap], step: int) -> SlotMap:
    """Return the map of `step`, from 1; after the last one, a cache that all have left."""
    if step <= len(history):
        return history[step - 1]
    last = history[-1]
    empty = len(last.owners)
    return SlotMap(step, (FREE,) * empty, (False,) * empty, last.block_size, 0)


def draw_slot_maps(maps: Sequence[SlotMap], names: Sequence[str], columns: int = 32) -> Figure:
    """Draw the maps side by side, `columns` slots a row, slot 0 at the top left. Returns the figure.

    Full colour: a token. Pale: held and empty. White: free. Lines part the blocks. Colours repeat after eight.
    """
    rows = -(-max(len(each.owners) for each in maps) // columns)
    figure, axes = plt.subplots(1, len(maps), figsize=(8.4, 1.35 + 0.125 * rows * 32 / columns), squeeze=False)
    for ax, each, name in zip(axes[0], maps, names, strict=True):
        _draw(ax, each, columns)
        count = f"{each.in_flight} sequence{'' if each.in_flight == 1 else 's'}"
        ax.set_title(f"{name}\n{count}, {each.share_stored:.0%} of the slots used", fontsize=11)
    figure.supxlabel("full colour: a token; pale: held, and empty; white: free", fontsize=10)
    return figure


def _draw(ax: Axes, data: SlotMap, columns: int) -> None:
    rows = -(-len(data.owners) // columns)
    picture = np.ones((rows * columns, 3))
    for slot, (owner, stored) in enumerate(zip(data.owners, data.stored, strict=True)):
        if owner != FREE:
            fill = style.sequence_fill(owner)
            picture[slot] = to_rgb(fill if stored else style.tint(fill, _EMPTY))
    extent = (0, columns, rows, 0)
    ax.imshow(picture.reshape(rows, columns, 3), extent=extent, aspect="auto", interpolation="nearest", zorder=1)
    for row in range(1, rows):
        ax.axhline(row, color=style.PAPER, linewidth=1.2, zorder=2)
    size = data.block_size
    if size is not None and size < columns:
        for column in range(size, columns, size):
            ax.axvline(column, color=style.INK, linewidth=0.5, zorder=2)
    ax.set(xticks=range(0, columns + 1, 8), yticks=[row + 0.5 for row in range(0, rows, 4)])
    ax.set_yticklabels([f"{row * columns}" for row in range(0, rows, 4)])
    ax.set_ylabel("slot")
    ax.grid(visible=False)
    ax.spines[["top", "right"]].set_visible(True)
