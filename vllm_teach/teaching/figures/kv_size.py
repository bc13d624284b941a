"""How many bytes one token's keys and values take in the KV cache of several models: arithmetic, drawn as bars."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class KVShape:
    """What decides the size: layers, key/value heads, numbers per head, bytes per number."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """One key and one value of `head_dim` numbers for each KV head in each layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes


def draw_kv_size(shapes: Mapping[str, KVShape], context: int = 4096) -> tuple[Figure, dict[str, int]]:
    """Draw bytes per token for each model; each bar also says what one sequence of `context` tokens takes.

    Returns the figure and bytes per token by name. Raises InvalidArgumentError without shapes.
    """
    if not shapes:
        raise InvalidArgumentError("shapes is empty: name at least one model.")
    sizes = {name: shape.bytes_per_token for name, shape in shapes.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    figure, ax = plt.subplots(figsize=(7.6, 0.52 * len(sizes) + 1.2))
    rows = range(len(sizes))
    fills = [style.colour("cached") if name == largest else style.tint(style.colour("cached"), 0.55) for name in sizes]
    ax.barh(rows, list(sizes.values()), height=0.66, color=fills)
    for row, size in zip(rows, sizes.values(), strict=True):
        text = f"{style.format_bytes(size)}  ({style.format_bytes(size * context)} for {context:,} tokens)"
        ax.annotate(text, (size, row), (5, 0), textcoords="offset points", va="center", size=10)
    ax.set_yticks(rows, list(sizes))
    ax.set_ylim(len(sizes) - 0.45, -0.55)
    top = sizes[largest]
    style.label_axis(ax, "x", "KV cache of one token", kind="bytes", ticks=[top * part / 4 for part in range(5)])
    ax.set_xlim(0, top * 1.75)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_title(f"{largest.split(',')[0]} keeps {style.format_bytes(top)} for every token")
    return figure, sizes
