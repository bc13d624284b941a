"""What the slots of a KV cache do under each way to give them out: a bar of all slots for each."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.memory_split import MemorySplit
from vllm_teach.teaching import style

# (field, what the legend says, fill, hatch): what serves someone is solid, what is in vain is hatched.
PARTS = (
    ("stored", "holds a token", style.colour("measured"), ""),
    ("to_come", "held, will hold one later", style.tint(style.colour("measured"), 0.35), ""),
    ("never", "held, never used", style.colour("naive"), "///"),
    ("free", "free, and of no use to who waits", style.colour("skipped"), "..."),
)


def draw_memory_split(splits: Sequence[MemorySplit], names: Sequence[str] | None = None) -> Figure:
    """Draw a bar for each split, the first at the top, with the share of the slots that hold a token beside it.

    `names` are the bars' labels, by default those of the splits. Returns the figure. Raises InvalidArgumentError for
    no split, and for another number of names than of splits.
    """
    labels = [split.name for split in splits] if names is None else list(names)
    if not splits or len(labels) != len(splits):
        raise InvalidArgumentError(f"splits has {len(splits)} entries and names {len(labels)}: give as many, and one.")
    figure, ax = plt.subplots(figsize=(8.4, 1.5 + 0.42 * len(splits)))
    left = [0.0] * len(splits)
    for field, text, fill, hatch in PARTS:
        shares = [100 * getattr(split, field) for split in splits]
        ax.barh(
            range(len(splits)),
            shares,
            left=left,
            color=fill,
            hatch=hatch,
            edgecolor=style.PAPER,
            linewidth=0.6,
            label=text,
        )
        left = [start + share for start, share in zip(left, shares, strict=True)]
    for row, split in enumerate(splits):
        ax.text(101.5, row, f"{100 * split.stored:.0f} %", va="center", ha="left", weight="bold")
    ax.set_yticks(range(len(splits)), labels)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.grid(visible=False)
    style.label_axis(ax, "x", "share of all slots", unit="%, mean over the steps with requests waiting")
    least, most = min(split.stored for split in splits), max(split.stored for split in splits)
    ax.set_title(f"From {100 * least:.0f} to {100 * most:.0f} % of the memory hold a token")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
