"""Where a model's attention weight goes: to the first keys, to the nearest ones, or to those in between."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vllm_teach.attention.chunked import chunked_attention
from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow, Pattern
from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

_PLACES = ("sinks", "local_window", "rest")
_COLOURS = (style.colour("sinks"), style.tint(style.colour("local_window"), 0.8), style.colour("skipped"))

Projections = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class WeightByPlace:
    """Each query's attention weight by place of the key, float `[layers, q_len]`, the mean over the heads.

    `sinks` are the first keys, `local_window` the last ones that are no sinks, `rest` those in between: together 1.
    """

    first: int
    window: int
    layers: tuple[int, ...]
    shares: dict[str, torch.Tensor]

    def share(self, place: str, beyond: int | None = None) -> float:
        """The mean share over all layers, of the queries from `beyond` on (by default those that see a rest)."""
        start = self.first + self.window if beyond is None else beyond
        return float(self.shares[place][:, start:].mean())


def weight_by_place(projections: Projections, first: int, window: int) -> WeightByPlace:
    """Return where the weight of causal attention lies, without ever storing it: layer -> (q, k), `[len, heads, d]`.

    The weight on the keys that a pattern shows is exp(lse(pattern) - lse(all)): the log-sum-exp holds the sum of the
    exponentials over its keys. `window` counts keys, the query's own among them.

    Raises InvalidArgumentError without a layer, and for sizes that are not positive.
    """
    check_count("first", first, 1)
    check_count("window", window, 1)
    if not projections:
        raise InvalidArgumentError("projections is empty; give q and k of at least one layer.")
    sinks = GlobalTokens(first)
    places: dict[str, Pattern] = {"sinks": sinks, "local_window": LocalWindow(window - 1) & ~sinks}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in (*places, "rest")}
    for q, k in projections.values():
        every = _lse(q, k, Causal())  # [heads, len]
        shares = {name: (_lse(q, k, pattern) - every).exp().mean(dim=0) for name, pattern in places.items()}
        shares["rest"] = (1 - shares["sinks"] - shares["local_window"]).clamp(min=0)  # rounding may take it below
        for name, share in shares.items():
            found[name].append(share)
    return WeightByPlace(first, window, tuple(projections), {name: torch.stack(rows) for name, rows in found.items()})


def _lse(q: torch.Tensor, k: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    one_value = k[None, ..., :1]  # the output is not asked for, so values of one number do
    with torch.no_grad():
        return chunked_attention(q[None], k[None], one_value, pattern=pattern, return_lse=True)[1][0]


def draw_weight_by_place(data: WeightByPlace, smooth: int = 64) -> Figure:
    """Draw the shares as stacked areas over the query's position, and as a bar for each layer.

    An area's point is the mean of `smooth` queries and all layers; a bar that of the queries that see keys in between.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 4.1), width_ratios=(1.45, 1))
    over_layers = {name: rows.double().mean(dim=0) for name, rows in data.shares.items()}  # [q_len]
    means = {name: row.unfold(0, smooth, smooth).mean(dim=1) for name, row in over_layers.items()}
    middle = (torch.arange(len(means["rest"])) + 0.5) * smooth
    areas = left.stackplot(middle.tolist(), [means[name].tolist() for name in _PLACES], colors=_COLOURS)
    for area in areas:
        area.set_edgecolor(style.PAPER)
    left.axvline(data.window, color=style.colour("limit"), linestyle=":", linewidth=1.5)
    length = next(iter(data.shares.values())).shape[1]
    left.set(xlim=(0, length), ylim=(0, 1))
    left.set_title("By position", size=10.5, weight="normal")
    style.label_axis(left, "x", "position of the query", unit="tokens", kind="tokens")
    style.label_axis(left, "y", "share of the attention weight")

    start = data.first + data.window
    rows = torch.arange(len(data.layers)).tolist()
    before = torch.zeros(len(rows), dtype=torch.float64)
    for name, fill in zip(_PLACES, _COLOURS, strict=True):
        widths = data.shares[name][:, start:].double().mean(dim=1)
        right.barh(rows, widths.tolist(), left=before.tolist(), color=fill, height=0.82, edgecolor=style.PAPER)
        before += widths
    right.set(xlim=(0, 1), yticks=rows, yticklabels=[f"{layer}" for layer in data.layers])
    right.invert_yaxis()
    right.set_title(f"By layer, queries from {start:,} on", size=10.5, weight="normal")
    style.label_axis(right, "x", "share")
    style.label_axis(right, "y", "layer")
    labels = [f"the first {data.first} keys", f"the last {data.window:,} keys", "the keys in between"]
    handles = [Patch(facecolor=fill, label=label) for fill, label in zip(_COLOURS, labels, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    for ax in (left, right):
        ax.grid(False)
    return figure
