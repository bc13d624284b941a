"""FlashAttention's error rule: each backend's error as a multiple of the plain formula's in the same dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from vllm_teach import backends
from vllm_teach.backends.conformance import Row
from vllm_teach.backends.conformance.truth import references
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.backend_times import MARKERS

LIMIT = 2.0  # times the plain formula's error, plus 1e-5


@dataclass(frozen=True)
class RowErrors:
    """One call of the conformance table: the plain formula's largest error, and each backend's; all against float64."""

    row: str
    plain_error: float
    errors: dict[str, float]

    @property
    def limit(self) -> float:
        """What the rule allows."""
        return LIMIT * self.plain_error + 1e-5

    def keeps(self, name: str) -> bool:
        """Whether a backend keeps the rule."""
        return self.errors[name] <= self.limit


def row_errors(row: Row, names: Sequence[str]) -> RowErrors:
    """Run a dense row of the conformance table on each backend and compare with the formula in float64."""
    exact, plain = references(row)
    inputs = row.inputs()
    with torch.no_grad():
        outs = {name: backends.get(name).run(*inputs[:3], layout=inputs.layout, **inputs.arguments) for name in names}

    def worst(answers: Sequence[torch.Tensor] | torch.Tensor) -> float:
        return max(float((a.double() - b).abs().max()) for a, b in zip(answers, exact.outs, strict=True))

    return RowErrors(row.name, worst(plain.outs), {name: worst(out) for name, out in outs.items()})


def draw_error_rule(data: Sequence[RowErrors], titles: Mapping[str, str] | None = None) -> Figure:
    """Draw a row per call and a mark per backend at its error over the plain formula's; 2 is the limit."""
    figure, ax = plt.subplots(figsize=(8.4, 0.75 * len(data) + 1.6))
    ax.axvspan(0, LIMIT, color=style.tint(style.colour("sdpa"), 0.18), zorder=0)
    ax.axvline(LIMIT, color=style.colour("limit"), linewidth=2, label="limit")
    ax.axvline(1, color=style.colour("baseline"), linestyle="--", linewidth=1.5, label="the plain formula")
    names = list(dict.fromkeys(name for one in data for name in one.errors))
    for index, name in enumerate(names):
        lift = 0.5 * ((index + 0.5) / len(names) - 0.5)  # marks at one place lie beside each other
        places = [
            (one.errors[name] / one.plain_error, row + lift) for row, one in enumerate(data) if name in one.errors
        ]
        ax.plot(*zip(*places, strict=True), MARKERS[name], color=style.colour(name), markersize=7, label=name, zorder=3)
    ax.set_yticks(range(len(data)), [(titles or {}).get(one.row, one.row) for one in data])
    ax.set_ylim(len(data) - 0.5, -0.5)
    ax.set_xlim(0, max(LIMIT + 0.3, 1.1 * max(max(one.errors.values()) / one.plain_error for one in data)))
    style.label_axis(ax, "x", "largest error, in multiples of the plain formula's in the same dtype")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4)
    return figure
