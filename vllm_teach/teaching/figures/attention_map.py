"""The attention probabilities of one head as a heat map: which token reads which."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_WRITTEN_FROM = 0.095  # cells below this weight carry no number: they would only be grey noise


@dataclass(frozen=True)
class AttentionMapData:
    """What the figure shows: P `[n, n]`, the tokens' texts, and for each query the key it reads most."""

    words: tuple[str, ...]
    probs: torch.Tensor
    read_most: tuple[int, ...]

    def most(self, query: int) -> tuple[str, float]:
        """Return the text of the key that `query` reads most, and its weight; negative numbers count from the end."""
        key = self.read_most[query]
        return self.words[key], float(self.probs[query, key])


def attention_map_data(words: Sequence[str], probs: torch.Tensor) -> AttentionMapData:
    """Check that `probs` `[n, n]` fits the n `words`; raises InvalidArgumentError when it does not."""
    n = len(words)
    if tuple(probs.shape) != (n, n):
        raise InvalidArgumentError(f"probs has shape {list(probs.shape)}; {n} words need [{n}, {n}].")
    return AttentionMapData(tuple(w.strip() or "␣" for w in words), probs, tuple(probs.argmax(dim=-1).tolist()))


def draw_attention_map(
    words: Sequence[str],
    probs: torch.Tensor,
    *,
    title: str,
    mark: tuple[int, int] | None = None,
    size: float = 7.4,
    colour_bar: bool = True,
) -> tuple[Figure, AttentionMapData]:
    """Draw causal attention probabilities `[n, n]`: rows are queries, columns keys, darker is more.

    Weights of 10 % and more are written in their cells, in percent. What the causal mask hides is hatched. `mark`
    frames the cell (query, key). `colour_bar=False` draws faster, for a widget.
    Returns the figure, `size` inches wide, and its data.
    """
    data = attention_map_data(words, probs)
    n = len(data.words)
    figure, axes = plt.subplots(figsize=(size, 0.89 * size))
    shades = LinearSegmentedColormap.from_list("attention", [style.PAPER, style.colour("attention"), "#4A1242"])
    image = axes.imshow(probs.float().numpy(), cmap=shades, vmin=0, vmax=1)
    stairs = [(x, y) for row in range(n - 1) for x, y in ((row + 0.5, row - 0.5), (row + 0.5, row + 0.5))]
    hidden = Polygon([*stairs, (n - 0.5, n - 1.5), (n - 0.5, -0.5)], facecolor="#F4F4F4", edgecolor="#D2D2D2")
    hidden.set(hatch="////", linewidth=0)
    axes.add_patch(hidden)
    for query in range(n):
        for key in range(query + 1):
            weight = float(probs[query, key])
            if weight >= _WRITTEN_FROM:
                ink = style.PAPER if weight > 0.35 else style.INK
                axes.text(key, query, f"{100 * weight:.0f}", ha="center", va="center", size=9, color=ink)
    if mark is not None:
        corner = (mark[1] - 0.5, mark[0] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=style.colour("here"), linewidth=3, zorder=5))
    axes.set_title(title, pad=8)
    axes.set_xticks(range(n), data.words, rotation=55, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), data.words)
    axes.set_xticks([i - 0.5 for i in range(1, n)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, n)], minor=True)
    axes.grid(False)
    axes.grid(which="minor", color="#EEEEEE", linewidth=0.7)
    axes.tick_params(which="both", length=0)
    axes.set(xlabel="key: the token that is read", ylabel="query: the token that reads")
    for spine in axes.spines.values():
        spine.set_visible(False)
    if colour_bar:
        bar = figure.colorbar(image, ax=axes, shrink=0.72, pad=0.015, ticks=[0, 0.25, 0.5, 0.75, 1])
        bar.ax.set_yticklabels(["0 %", "25 %", "50 %", "75 %", "100 %"])
        bar.outline.set_visible(False)
        bar.set_label("attention weight; each row sums to 100 %")
    return figure, data
