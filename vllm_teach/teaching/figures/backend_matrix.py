"""What each backend takes: a matrix of backends by features, asked of `supports`, so the same on every machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach import backends
from vllm_teach.attention.patterns import BlockSparsePattern, Causal, LocalWindow
from vllm_teach.backends import AttentionSpec
from vllm_teach.teaching import style

# The device whose kernels a library is made for; the others are asked about a CPU.
HOME = {"flash_attn": "cuda", "xformers": "cuda", "triton": "cuda"}
PLAIN = AttentionSpec(1, 64, 64, q_heads=8, kv_heads=8, head_dim=64, dtype=torch.float16, pattern=Causal())
# What each column changes in a plain causal call in float16.
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "float16": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "head_dim 512": {"head_dim": 512},
    "shared K/V heads (GQA)": {"kv_heads": 2},
    "window": {"pattern": LocalWindow(15, 0)},
    "block-sparse pattern": {"pattern": BlockSparsePattern([[True, False], [True, True]], 32)},
    "softcap": {"softcap": 30.0},
    "ALiBi": {"alibi": True},
    "dropout with a seed": {"dropout": True},
    "gradients": {"requires_grad": True},
    "varlen": {"layout": "varlen"},
    "paged, blocks of 16": {"layout": "paged", "block_size": 16},
    "paged, blocks of 256": {"layout": "paged", "block_size": 256},
}


@dataclass(frozen=True)
class SupportMatrix:
    """Why each backend refuses each feature: `refusals[backend][feature]`, None where it takes the call."""

    features: tuple[str, ...]
    refusals: dict[str, dict[str, str | None]]

    def taken(self, name: str) -> int:
        """How many of the features a backend takes."""
        return sum(reason is None for reason in self.refusals[name].values())

    @property
    def universal(self) -> list[str]:
        """The backends that take every feature."""
        return [name for name in self.refusals if self.taken(name) == len(self.features)]

    @property
    def title(self) -> str:
        """The picture's message."""
        return f"{len(self.universal)} of {len(self.refusals)} backends take every kind of call"


def support_matrix(names: Sequence[str] | None = None) -> SupportMatrix:
    """Ask each backend, by default all, about each of FEATURES on the device that it is made for."""
    refusals = {}
    for name in names or backends.names():
        plain = replace(PLAIN, device=HOME.get(name, "cpu"))
        asked = {feature: replace(plain, **change) for feature, change in FEATURES.items()}
        refusals[name] = {feature: backends.get(name).supports(spec) for feature, spec in asked.items()}
    return SupportMatrix(tuple(FEATURES), refusals)


def draw_support_matrix(data: SupportMatrix) -> Figure:
    """Draw one row a backend and one column a feature: a filled cell is taken, an empty one with a cross refused."""
    rows, columns = len(data.refusals), len(data.features)
    figure, ax = plt.subplots(figsize=(8.4, 0.34 * rows + 2.0))
    for row, (name, reasons) in enumerate(data.refusals.items()):
        for column, reason in enumerate(reasons.values()):
            fill = style.colour(name) if reason is None else "#F1F1F1"
            ax.add_patch(Rectangle((column + 0.06, row + 0.1), 0.88, 0.8, facecolor=fill, edgecolor="none"))
            if reason is not None:
                ax.text(column + 0.5, row + 0.5, "×", ha="center", va="center", size=12, color=style.QUIET_INK)
    ax.set(xlim=(0, columns), ylim=(rows, 0))
    labels = [f"{name} ({'GPU' if name in HOME else 'CPU'})" for name in data.refusals]
    ax.set_yticks([row + 0.5 for row in range(rows)], labels)
    ax.set_xticks([column + 0.5 for column in range(columns)], data.features, rotation=40, ha="right", size=9.5)
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(data.title)
    return figure
