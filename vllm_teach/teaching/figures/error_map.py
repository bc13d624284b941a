"""What rounding does to one weight matrix: the change of each weight, and what it costs in the output."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_NAMES = {"rtn": "RTN", "gptq": "GPTQ", "awq": "AWQ"}


@dataclass(frozen=True, eq=False)
class ErrorMap:
    """A matrix and its rounded versions, in columns sorted by nothing: as the inputs lie.

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


def draw_error_map(data: ErrorMap, rows: int = 96) -> Figure:
    """Draw the inputs' sizes above, and each method's change of the first `rows` rows below, on one scale of greys."""
    names = list(data.changes)
    ratios = [0.9] + [1.0] * len(names)
    figure, axes = plt.subplots(
        len(names) + 1, 1, figsize=(8.2, 1.55 * (len(names) + 1)), sharex=True, height_ratios=ratios
    )
    columns = range(len(data.sizes))
    axes[0].fill_between(columns, data.sizes, step="mid", color=style.colour("baseline"))
    style.label_axis(axes[0], "y", "size of input", log=10)
    axes[0].set_title("Some inputs are far larger than the others")
    top = float(torch.stack([each[:rows].float() for each in data.changes.values()]).quantile(0.99))
    for ax, name in zip(axes[1:], names, strict=True):
        image = ax.imshow(data.changes[name][:rows], cmap="Greys", vmin=0, vmax=top, aspect="auto")
        ax.set_title(f"{_NAMES[name]}: change of each weight", color=style.colour(name))
        ax.grid(False)
        style.label_axis(ax, "y", "output")
    style.label_axis(axes[-1], "x", "input channel")
    axes[0].set_xlim(-0.5, len(data.sizes) - 0.5)
    figure.colorbar(image, ax=axes[1:], label="|change|", shrink=0.8, extend="max")
    return figure
