"""Two workers, each with a part of the keys, and the merge of their states: the basis of split-KV decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.attention.online_softmax import SoftmaxState, finish, merge, update
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import Arrow, Box, draw_arrow, draw_box, page

_W, _H = 8.4, 3.35  # the page, inches
_LEFT, _RIGHT = 0.55, 7.85  # the row of keys


@dataclass(frozen=True)
class PartialState:
    """The state of one part of a row: which keys (start, end), m, l, and the first element of acc and of acc / l."""

    keys: tuple[int, int]
    m: float
    l: float  # noqa: E741  the papers' name
    acc: float
    out: float

    def describe(self) -> str:
        """Three numbers, two decimals."""
        return f"m = {self.m:.2f}   l = {self.l:.2f}   acc = {self.acc:.2f}"


@dataclass(frozen=True)
class MergeData:
    """The two parts, their merge, and the weights exp(m of the part - m) that the merge gives them."""

    first: PartialState
    second: PartialState
    merged: PartialState
    weights: tuple[float, float]


def merge_data(scores: Sequence[float], values: Sequence[Sequence[float]], split: int) -> MergeData:
    """Run `update` over keys below `split` and over the others, then `merge`; scores `[keys]`, values `[keys, dim]`.

    Raises InvalidArgumentError when `split` leaves one side without a key.
    """
    if not 0 < split < len(scores):
        raise InvalidArgumentError(f"split is {split}; with {len(scores)} keys use 1 to {len(scores) - 1}.")
    s = torch.tensor([list(scores)], dtype=torch.float64)  # [1, keys]
    v = torch.tensor([list(value) for value in values], dtype=torch.float64)  # [keys, value_dim]
    empty = SoftmaxState.empty([1], v.shape[1], dtype=torch.float64)
    a, b = update(empty, s[:, :split], v[:split]), update(empty, s[:, split:], v[split:])
    both = merge(a, b)
    return MergeData(
        first=_numbers(a, 0, split),
        second=_numbers(b, split, len(scores)),
        merged=_numbers(both, 0, len(scores)),
        weights=(float(torch.exp(a.m - both.m)), float(torch.exp(b.m - both.m))),
    )


def _numbers(state: SoftmaxState, start: int, end: int) -> PartialState:
    out, _ = finish(state)
    return PartialState((start, end), float(state.m), float(state.l), float(state.acc[0, 0]), float(out[0, 0]))


def draw_merge(scores: Sequence[float], values: Sequence[Sequence[float]], split: int) -> tuple[Figure, MergeData]:
    """Draw the row of keys cut at `split`, a worker per part, and the merged state; returns the figure and its data."""
    data = merge_data(scores, values, split)
    figure, axes = page(_W, _H, "Two workers share one row; the merge gives what one worker would have got")
    cell = (_RIGHT - _LEFT) / len(scores)
    for key, score in enumerate(scores):
        fill = style.sequence_fill(0 if key < split else 1)
        axes.add_patch(Rectangle((_LEFT + key * cell, 2.42), cell, 0.3, facecolor=fill, edgecolor=style.INK, lw=0.8))
        axes.text(_LEFT + (key + 0.5) * cell, 2.57, f"{score:.1f}", ha="center", va="center", size=8.5)
    axes.text(_LEFT, 2.79, "scores of one query, one cell a key", size=9, color=style.QUIET_INK)
    middles = [_LEFT + cell * sum(part.keys) / 2 for part in (data.first, data.second)]
    boxes = []
    for number, (part, middle) in enumerate(zip((data.first, data.second), middles, strict=True), start=1):
        x = min(max(middle - 1.6, 0.12), _W - 3.32)
        boxes.append(Box(f"worker{number}", f"worker {number}", part.describe(), x, 1.42, 3.2, 0.62))
        draw_arrow(axes, Arrow("", "", ((x + 1.6, 2.42), (x + 1.6, 2.04))))
    total = Box(
        "merged", "merge", f"{data.merged.describe()}   out = {data.merged.out:.2f}", 2.1, 0.12, 4.2, 0.62, "here"
    )
    for box, part, weight, at in zip(boxes, (data.first, data.second), data.weights, (0.2, 0.8), strict=True):
        start, end = box.anchor("bottom"), total.anchor("top", at)
        draw_arrow(axes, Arrow("", "", (start, (start[0], 1.08), (end[0], 1.08), end)))
        side = -1 if at < 0.5 else 1
        axes.text(
            start[0] + side * 0.1,
            1.2,
            f"× exp({part.m:.2f} − {data.merged.m:.2f}) = {weight:.2f}",
            size=9,
            ha="right" if side < 0 else "left",
            va="center",
        )
    for box in (*boxes, total):
        draw_box(axes, box, caption_size=9)
    return figure, data
