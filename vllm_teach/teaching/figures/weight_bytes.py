"""What one decoding step reads, by dtype of the weights: linear layers, head, and the context's keys and values."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.bits_and_error import bits_a_weight

_PARTS = {"linear layers": "linear", "embedding, read as head": "embedding", "keys and values": "attention"}


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step reads for one sequence of `context` tokens: {way to store weights: {part: bytes}}."""

    context: int
    reads: dict[str, dict[str, float]]

    def total(self, way: str) -> float:
        """All bytes of one way."""
        return sum(self.reads[way].values())


def step_bytes(config: ModelConfig, context: int, group_size: int = 64) -> StepBytes:
    """Count for float32, bfloat16, int8 (whole rows) and int4 (groups of `group_size`) linear layers.

    Keys and values are bfloat16 throughout (float32 for float32 weights). Norms, and the one scale of an int8 row, are
    left out: less than a hundredth.
    Raises InvalidArgumentError for a negative context.
    """
    if context < 0:
        raise InvalidArgumentError(f"context={context!r} is not valid: give 0 tokens or more.")
    heads = config.num_q_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_q_heads)
    linear = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context
    int4 = bits_a_weight(4, group_size) / 8
    ways = {
        "float32": (4, 4, 4),
        "bfloat16": (2, 2, 2),
        "int8": (1, 2, 2),
        "int4": (int4, 2, 2),
        "int4, int8 head": (int4, 1, 2),
    }
    numbers = (linear, head, cached)
    return StepBytes(
        context,
        {
            way: {part: number * size for part, number, size in zip(_PARTS, numbers, sizes, strict=True)}
            for way, sizes in ways.items()
        },
    )


def draw_step_bytes(data: StepBytes) -> Figure:
    """Draw one bar for each way, its parts stacked. Returns the figure."""
    figure, ax = plt.subplots(figsize=(7.6, 3.3))
    colours = {"linear": style.colour("linear"), "embedding": "#88CCEE", "attention": style.colour("attention")}
    places = range(len(data.reads))
    left = [0.0] * len(data.reads)
    for part, concept in _PARTS.items():
        sizes = [row[part] / 2**20 for row in data.reads.values()]
        ax.barh(places, sizes, left=left, color=colours[concept], label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for place, total in zip(places, left, strict=True):
        ax.text(total + 5, place, f"{total:.0f} MiB", va="center", size=9)
    ax.set_yticks(places, data.reads)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.14 * max(left))
    style.label_axis(ax, "x", "read for one token", unit="MiB")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    ax.set_title("One token reads every weight once")
    return figure
