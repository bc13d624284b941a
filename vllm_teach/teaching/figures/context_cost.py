"""What one token costs a model as the context grows: the linear layers, full causal attention, a window."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.attention.patterns import Causal, LocalWindow, Pattern
from vllm_teach.models.config import ModelConfig
from vllm_teach.performance.shares import LayerShape
from vllm_teach.teaching import style


@dataclass(frozen=True)
class ContextCost:
    """FLOPs per token, on average over a text of each length: attention by pattern, and all that is no attention."""

    lengths: tuple[int, ...]
    rest: int
    attention: dict[str, tuple[float, ...]]

    def share(self, name: str, n: int) -> float:
        """Attention's share of all FLOPs in a text of `n` tokens, one of `lengths`."""
        cost = self.attention[name][self.lengths.index(n)]
        return cost / (cost + self.rest)

    @property
    def crossing(self) -> float:
        """The length from which full causal attention costs more than the rest: attention grows in proportion to n."""
        return self.lengths[-1] * self.rest / self.attention["causal"][-1]


def context_cost(config: ModelConfig, lengths: Sequence[int], window: int) -> ContextCost:
    """Count a model's FLOPs per token: two for each weight of a matrix, 4 x head_dim for each pair and query head.

    Norms, activations and the softmax (below 1 %) are left out. `window` counts keys, the query's own among them.
    """
    layer = LayerShape.of(config)
    per_pair = 4 * config.num_q_heads * config.head_dim * config.num_layers
    patterns: dict[str, Pattern] = {"causal": Causal(), "local_window": LocalWindow(window - 1)}
    return ContextCost(
        lengths=tuple(lengths),
        rest=2 * (layer.linear_parameters * config.num_layers + config.vocab_size * config.hidden_size),
        attention={
            name: tuple(per_pair * pattern.density(n, n) * n for n in lengths) for name, pattern in patterns.items()
        },
    )


def draw_context_cost(ax: Axes, data: ContextCost, window: int) -> None:
    """Draw the three costs against the length, both axes logarithmic; changes `ax`."""
    lines = [
        ("causal", "attention, full causal", "o-"),
        ("local_window", f"attention, a window of {window:,}", "s-"),
    ]
    for name, label, marker in lines:
        ax.plot(data.lengths, data.attention[name], marker, color=style.colour(name), label=label)
    ax.axhline(data.rest, color=style.colour("linear"), linestyle="--", label="linear layers and logits")
    ax.axvline(data.crossing, color=style.QUIET_INK, linewidth=1, linestyle=":", zorder=1)
    low = min(min(values) for values in data.attention.values())
    ax.text(data.crossing * 1.06, low * 1.15, f"n = {data.crossing:,.0f}", size=10, color=style.QUIET_INK, va="bottom")
    style.label_axis(ax, "x", "length of the text", unit="tokens", kind="tokens", log=2, ticks=data.lengths[::2])
    style.label_axis(ax, "y", "FLOPs per token", kind="count", log=10)
    ax.legend(loc="upper left")
