"""A dropout mask drawn whole beside the same mask drawn tile by tile, in another order: counter-based, so equal."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from vllm_teach.attention.dropout import keep_mask
from vllm_teach.attention.traffic import cut
from vllm_teach.teaching import style


@dataclass(frozen=True, eq=False)
class StitchedMask:
    """Two masks of one head, bool `[n, n]`, True where a pair is kept, and the tiles in the order they were drawn."""

    whole: torch.Tensor
    stitched: torch.Tensor
    order: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    @property
    def equal(self) -> bool:
        """True when the two masks agree in every pair."""
        return torch.equal(self.whole, self.stitched)

    @property
    def dropped(self) -> int:
        """How many pairs the mask drops."""
        return int((~self.whole).sum())


def stitched_mask(n: int, tile: int, dropout_p: float, seed: int) -> StitchedMask:
    """Draw the mask of an n x n head in one go, and again in tiles, in an order shuffled by `seed`."""
    head = torch.zeros(1, dtype=torch.int64)
    tiles = [(rows, keys) for rows in cut(n, tile) for keys in cut(n, tile)]
    shuffled = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(seed)).tolist()
    order = tuple(tiles[index] for index in shuffled)
    stitched = torch.zeros(n, n, dtype=torch.bool)
    for rows, keys in order:
        stitched[slice(*rows), slice(*keys)] = keep_mask(seed, dropout_p, head, rows, keys)[0]
    return StitchedMask(keep_mask(seed, dropout_p, head, (0, n), (0, n))[0], stitched, order)


def draw_stitched_mask(n: int, tile: int, dropout_p: float, seed: int) -> tuple[Figure, StitchedMask]:
    """Draw both masks, and in the second each tile's place in the order; returns the figure and its data."""
    data = stitched_mask(n, tile, dropout_p, seed)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 4.5))
    _draw_mask(left, data.whole, "drawn in one go")
    _draw_mask(right, data.stitched, f"drawn in {len(data.order)} tiles, in the order of the numbers")
    for number, (rows, keys) in enumerate(data.order, start=1):
        corner = keys[0] - 0.5, rows[0] - 0.5
        right.add_patch(plt.Rectangle(corner, tile, tile, fill=False, edgecolor=style.colour("tiled"), linewidth=1.2))
        right.text(
            *(keys[0] + tile / 2 - 0.5, rows[0] + tile / 2 - 0.5),
            str(number),
            ha="center",
            va="center",
            size=10,
            color=style.INK,
            bbox={"facecolor": style.PAPER, "edgecolor": style.colour("tiled"), "pad": 2},
        )
    title = "The same mask, whichever way it is drawn" if data.equal else "The masks differ"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    return figure, data


def _draw_mask(ax: Axes, mask: torch.Tensor, title: str) -> None:
    colours = ListedColormap([style.colour("current"), style.tint(style.colour("skipped"), 0.35)])
    ax.imshow(mask.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, fontsize=11, weight="normal")
    ax.set(xlabel="key", ylabel="query")
    ax.grid(visible=False)
