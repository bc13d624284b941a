"""Which tokens the model computes in each step, without a KV cache and with one: exact, drawn to scale."""

from dataclasses import dataclass
from typing import Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

State = Literal["computed", "read"]


@dataclass(frozen=True)
class Recompute:
    """For each step (the outer tuples), what happens at each position of the text: computed anew, or read."""

    uncached: tuple[tuple[State, ...], ...]
    cached: tuple[tuple[State, ...], ...]

    @property
    def computed_uncached(self) -> int:
        """Tokens computed without a cache, over all steps: each time a token passes through all layers counts once."""
        return sum(step.count("computed") for step in self.uncached)

    @property
    def computed_cached(self) -> int:
        """The same with a cache."""
        return sum(step.count("computed") for step in self.cached)


def recompute(prompt_len: int, new_tokens: int) -> Recompute:
    """Replay the generation of `new_tokens` after a prompt; both at least 1, or InvalidArgumentError.

    The last new token is never an input: `new_tokens` steps see texts of `prompt_len` to `prompt_len + new_tokens - 1`.
    """
    if prompt_len < 1 or new_tokens < 1:
        raise InvalidArgumentError(f"prompt_len={prompt_len}, new_tokens={new_tokens}: both must be at least 1.")
    lengths = range(prompt_len, prompt_len + new_tokens)
    computed: State = "computed"
    read: State = "read"
    uncached = tuple((computed,) * length for length in lengths)
    later = tuple((*(read,) * (length - 1), computed) for length in lengths[1:])
    return Recompute(uncached, ((computed,) * prompt_len, *later))


def draw_recompute(prompt_len: int, new_tokens: int) -> tuple[Figure, Recompute]:
    """Draw both as a grid, a row for each step and a column for each position in the text; returns figure and data."""
    data = recompute(prompt_len, new_tokens)
    width = prompt_len + new_tokens - 1
    # Cells are square: a panel is about 3.9 inches wide, and what stands above and below takes 1.3.
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.66 * new_tokens / width + 1.3), sharey=True)
    _grid(left, data.uncached, width, prompt_len, style.colour("uncached"))
    _grid(right, data.cached, width, prompt_len, style.colour("cached"))
    left.set_title(f"without a cache: {data.computed_uncached} computed", fontsize=11, weight="normal")
    right.set_title(f"with a cache: {data.computed_cached} computed", fontsize=11, weight="normal")
    left.set_yticks([step + 0.5 for step in range(new_tokens)], [str(step + 1) for step in range(new_tokens)])
    left.set_ylabel("step")
    figure.suptitle(
        "With a cache, each token of the text is computed once", x=0.01, ha="left", fontsize=12, weight="bold"
    )
    return figure, data


def _grid(ax: Axes, steps: tuple[tuple[State, ...], ...], width: int, prompt_len: int, colour: str) -> None:
    for row, step in enumerate(steps):
        for column, state in enumerate(step):
            fill = colour if state == "computed" else style.tint(colour, 0.16)
            ax.add_patch(Rectangle((column + 0.05, row + 0.05), 0.9, 0.9, facecolor=fill, edgecolor="none"))
            if state == "read":
                ax.text(column + 0.5, row + 0.5, "kept", size=7.5, ha="center", va="center", color=style.QUIET_INK)
    ax.plot([prompt_len, prompt_len], [0, len(steps)], color=style.INK, linewidth=1, linestyle=(0, (2, 2)))
    ax.set(xlim=(0, width), ylim=(len(steps), 0), aspect="equal")
    ax.set_xticks([column + 0.5 for column in range(width)], [str(column) for column in range(width)])
    ax.set_xlabel("position in the text (dashed: the prompt ends)")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
