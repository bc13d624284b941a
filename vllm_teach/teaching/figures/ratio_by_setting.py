"""One ratio, naive over tiled attention on an A100, in every setting that its claim may mean. Modelled."""

import itertools
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.attention.traffic import naive_traffic, tiled_traffic
from vllm_teach.teaching import style
from vllm_teach.validation.audit import a100

LENGTHS, HEAD_DIMS, MASKS = (1024, 2048, 4096), (64, 128), ("no mask", "causal")


@dataclass(frozen=True)
class Setting:
    """What a claim may leave open, and the modelled ratio of seconds in it."""

    length: int
    head_dim: int
    mask: str
    ratio: float


def ratios_by_setting(batch: int = a100.BATCH) -> tuple[Setting, ...]:
    """Return the roofline's ratio, naive / tiled, for each length, head size and mask; hidden size 2,048, float16.

    Memory limits all of them, so a card with another bandwidth has the same ratios.
    """
    found, hardware = [], a100.card()
    for length, head_dim, mask in itertools.product(LENGTHS, HEAD_DIMS, MASKS):
        sizes = a100.layer_sizes(length, batch, head_dim)
        naive = a100.seconds_by_step(naive_traffic(**sizes).by_name, hardware)
        tiled = a100.seconds(tiled_traffic(**sizes, **a100.tiled_sizes(), causal=mask == "causal"), hardware)
        found.append(Setting(length, head_dim, mask, naive / tiled))
    return tuple(found)


def draw_ratios(settings: tuple[Setting, ...], claimed: float, *, title: str) -> Figure:
    """Draw a dot for each setting, a line of dots for each head size and mask, and the claim as a vertical line."""
    groups = list(itertools.product(HEAD_DIMS, MASKS))
    figure, ax = plt.subplots(figsize=(8.0, 2.9))
    ax.axvline(claimed, color=style.colour("limit"), linewidth=2)
    ax.text(claimed, -0.72, f" claimed: {claimed:.1f}", color=style.colour("limit"), va="center")
    for y, (head_dim, mask) in enumerate(groups):
        for setting in settings:
            if (setting.head_dim, setting.mask) == (head_dim, mask):
                lift = 0.22 * (LENGTHS.index(setting.length) - 1)
                ax.plot([setting.ratio], [y + lift], "o", color=style.colour("tiled"))
    ax.set_yticks(range(len(groups)), [f"heads of {head_dim}, {mask}" for head_dim, mask in groups])
    ax.set(xlim=(0, 1.08 * max(setting.ratio for setting in settings)), ylim=(len(groups) - 0.5, -1.0))
    ax.set_xlabel("time of naive / tiled, A100, modelled; dots from the top: 1,024, 2,048, 4,096 tokens")
    ax.grid(axis="y", visible=False)
    ax.set_title(title)
    return figure
