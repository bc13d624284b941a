"""Two weights that share their inputs: where rounding to nearest ends and where GPTQ does, on a map of the error."""

from dataclasses import dataclass
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True, eq=False)
class RoundingPlane:
    """Two weights, the Hessian `[2, 2]` of their inputs, whole numbers as the grid, and what each method chooses.

    `mended` is the second weight after GPTQ has rounded the first. `errors` {method: mean squared output error}.
    """

    weights: tuple[float, float]
    hessian: torch.Tensor
    mended: float
    chosen: dict[str, tuple[int, int]]
    errors: dict[str, float]


def output_error(hessian: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Return ½ d H dᵀ for each row d of `off` `[..., 2]`: the mean squared error of the output."""
    return ((off @ hessian) * off).sum(-1) / 2


def rounding_plane(weights: tuple[float, float], hessian: torch.Tensor) -> RoundingPlane:
    """Round two weights to whole numbers: each to its nearest, by GPTQ from the first to the second, and the best.

    `hessian` is float64 `[2, 2]`, the mean of 2xxᵀ. Raises InvalidArgumentError unless it is positive definite.
    """
    if hessian.shape != (2, 2) or float(torch.linalg.eigvalsh(hessian).min()) <= 0:
        raise InvalidArgumentError(f"hessian={hessian.tolist()} is no positive definite [2, 2] matrix: give one.")
    w = torch.tensor(weights, dtype=torch.float64)
    first = round(weights[0])
    # With the first weight fixed, the error is a parabola in the second: its lowest point is the mended weight.
    mended = weights[1] + float(hessian[1, 0] / hessian[1, 1]) * (weights[0] - first)
    around = range(-3, 4)
    options = [(round(weights[0]) + i, round(weights[1]) + j) for i in around for j in around]
    best = min(options, key=lambda point: float(output_error(hessian, torch.tensor(point) - w)))
    chosen = {"rtn": (first, round(weights[1])), "gptq": (first, round(mended)), "best": best}
    errors = {name: float(output_error(hessian, torch.tensor(point) - w)) for name, point in chosen.items()}
    return RoundingPlane(weights, hessian, mended, chosen, errors)


def draw_rounding_plane(data: RoundingPlane) -> Figure:
    """Draw lines of equal output error around the weights, the grid, and both methods' ways. Returns the figure."""
    figure, ax = plt.subplots(figsize=(8.0, 4.3))
    x, y = data.weights
    xs, ys = torch.linspace(x - 1.7, x + 1.7, 121), torch.linspace(y - 1.7, y + 1.7, 121)
    points = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).double()
    error = output_error(data.hessian, points - torch.tensor([x, y], dtype=torch.float64))
    levels = sorted({round(each, 6) for each in (0.02, 0.1, 0.5, 1.5, 3.0)})
    lines = ax.contour(xs.tolist(), ys.tolist(), error.tolist(), levels=levels, colors="#AAAAAA", linewidths=1)
    ax.clabel(lines, levels[2:], fmt="%g", fontsize=8)
    grid = [(i, j) for i in range(-4, 6) for j in range(-4, 6) if abs(i - x) < 1.7 and abs(j - y) < 1.7]
    ax.plot(*zip(*grid, strict=True), "+", color=style.QUIET_INK, markersize=9)
    ax.plot(x, y, "o", color=style.INK, markersize=7, label="the weights")
    rtn, gptq = data.chosen["rtn"], data.chosen["gptq"]
    ax.annotate("", rtn, (x, y), arrowprops={"arrowstyle": "->", "color": style.colour("rtn"), "linewidth": 2})
    way = [(x, y), (rtn[0], y), (rtn[0], data.mended), gptq]
    for (start, end), dash in zip(pairwise(way), ("-", "--", "-"), strict=True):
        ax.plot(*zip(start, end, strict=True), dash, color=style.colour("gptq"))
    ax.plot(
        *rtn, "s", color=style.colour("rtn"), markersize=9, label=f"each to nearest: error {data.errors['rtn']:.2f}"
    )
    ax.plot(*gptq, "D", color=style.colour("gptq"), markersize=8, label=f"GPTQ: error {data.errors['gptq']:.2f}")
    best = f"the best: error {data.errors['best']:.2f}"
    ax.plot(*data.chosen["best"], "*", color=style.colour("ideal"), markersize=11, label=best)
    style.label_axis(ax, "x", "first weight, in steps of the grid")
    style.label_axis(ax, "y", "second weight, in steps")
    ax.set(aspect="equal", xlim=(x - 1.7, x + 1.7), ylim=(y - 1.7, y + 1.7))
    ax.grid(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    ax.set_title("The nearest point is not the cheapest")
    return figure
