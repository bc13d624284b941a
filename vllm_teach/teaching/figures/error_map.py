"""What rounding does to one weight matrix: the change of each weight, and what it costs in the output."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_NAMES = {"rtn": "RTN", "gptq": "GPTQ", "awq": "AWQ"}
_MARKS = ("o", "s", "^")


@dataclass(frozen=True, eq=False)
class ErrorMap:
    """A matrix and its rounded versions.

    `sizes` `[in]` are the root mean squares of the inputs; `changes` {method: |rounded - weight|, `[out, in]`}.
    """

    sizes: torch.Tensor
    changes: dict[str, torch.Tensor]

    def column(self, method: str) -> torch.Tensor:
        """The root mean square of a method's change of each column, `[in]`."""
        return self.changes[method].square().mean(0).sqrt()

    def share_of_largest(self, method: str, share: float = 0.01) -> float:
        """The part of sum (change * input)² that the largest `share` of the inputs causes, inputs taken one by one."""
        costs = (self.column(method) * self.sizes).square()
        count = max(1, round(share * len(costs)))
        return float(costs[self.sizes.topk(count).indices].sum() / costs.sum())


def error_map(weight: torch.Tensor, rounded: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> ErrorMap:
    """Compare `rounded` {method: `[out, in]`} with `weight` `[out, in]`, for `inputs` `[tokens, in]`.

    Raises InvalidArgumentError for a method without a name here, or shapes that do not fit.
    """
    for name, each in rounded.items():
        if name not in _NAMES or each.shape != weight.shape:
            raise InvalidArgumentError(
                f"rounded[{name!r}] has shape {list(each.shape)}: use the names {', '.join(_NAMES)} and the shape "
                f"{list(weight.shape)}."
            )
    if inputs.shape[1:] != weight.shape[1:]:
        raise InvalidArgumentError(f"inputs has shape {list(inputs.shape)}: the last size must be {weight.shape[1]}.")
    changes = {name: (each - weight).abs() for name, each in rounded.items()}
    return ErrorMap(inputs.square().mean(0).sqrt(), changes)


def draw_error_map(data: ErrorMap, columns: int = 64, rows: int = 40) -> Figure:
    """Draw `columns` inputs around the loudest one on the left, all of them on the right. Returns the figure.

    Left: the inputs' sizes, and each method's change of the first `rows` rows, on one scale of greys. Right: each
    input's size and its column's change.
    """
    names = list(data.changes)
    figure = plt.figure(figsize=(9.0, 1.4 * (len(names) + 1)))
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    axes = left.subplots(len(names) + 1, 1, sharex=True)
    loudest = int(data.sizes.argmax())
    first = min(max(0, loudest - columns // 2), len(data.sizes) - columns)
    part = slice(first, first + columns)
    axes[0].bar(range(first, first + columns), data.sizes[part].tolist(), width=0.9, color=style.colour("baseline"))
    axes[0].set_title("size of the inputs")
    top = float(torch.stack([each[:rows, part].float() for each in data.changes.values()]).quantile(0.97))
    edges = (first - 0.5, first + columns - 0.5, rows - 0.5, -0.5)
    for ax, name in zip(axes[1:], names, strict=True):
        ax.imshow(data.changes[name][:rows, part].tolist(), cmap="Greys", vmin=0, vmax=top, aspect="auto", extent=edges)
        ax.set_title(f"{_NAMES[name]}: change of each weight", color=style.colour(name))
        ax.set_ylabel("output")
    for ax in axes:
        ax.grid(False)
    style.label_axis(axes[-1], "x", "input channel")
    scatter = right.subplots()
    for depth, (name, mark) in enumerate(zip(names, _MARKS, strict=False)):
        look = {"color": style.colour(name), "markersize": 3, "zorder": 5 - depth, "linestyle": "none"}
        scatter.plot(data.sizes.tolist(), data.column(name).tolist(), marker=mark, label=_NAMES[name], **look)
    style.label_axis(scatter, "x", "size of the input", log=10)
    style.label_axis(scatter, "y", "change of its weights", log=10)
    scatter.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"])
    changes = torch.cat([data.column(name) for name in names])
    scatter.set_ylim(0.8 * float(changes[changes > 0].min()), 1.25 * float(changes.max()))
    scatter.legend(markerscale=2)
    scatter.set_title("all inputs")
    figure.suptitle("RTN treats all inputs alike, and the others do not", fontweight="bold", x=0.01, ha="left")
    return figure
