"""Perplexity against bytes for the ways to store one model, and one loss by several measures."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.quantization_bench import QuantizationBench
from vllm_teach.teaching import style

_CONCEPTS = ("rtn", "gptq", "awq", "int8")
_LINE = 11.0  # points that a name takes
_TICKS = (8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 500, 1000)


@dataclass(frozen=True)
class QualityAndSize:
    """{way to store the weights: (bytes of the model, perplexity)}; `baseline` is one of the names."""

    points: dict[str, tuple[int, float]]
    baseline: str

    def share(self, name: str) -> float:
        """The bytes of one way over the baseline's."""
        return self.points[name][0] / self.points[self.baseline][0]


@dataclass(frozen=True)
class LossByMeasure:
    """{model: {measure: percent lost}}, the measures in one order."""

    losses: dict[str, dict[str, float]]

    def spread(self, model: str) -> float:
        """How many times larger the largest of a model's losses is than the smallest one above 0."""
        found = [each for each in self.losses[model].values() if each > 0]
        return max(found) / min(found)


def quality_and_size(bench: QuantizationBench) -> QualityAndSize:
    """Return the points of a bench."""
    return QualityAndSize({row.name: (row.model_bytes, row.perplexity) for row in bench.rows}, "bf16")


def draw_quality_and_size(ax: Axes, data: QualityAndSize) -> None:
    """Draw a point for each way, named, and the baseline's perplexity as a line. Changes `ax`."""
    ax.axhline(data.points[data.baseline][1], color=style.colour("baseline"), linestyle=":")
    for name, (size, perplexity) in data.points.items():
        concept = next((each for each in _CONCEPTS if name.startswith(each)), "baseline")
        ax.plot(size / 2**20, perplexity, "o", color=style.colour(concept), markersize=8)
    style.label_axis(ax, "x", "weights of the whole model", unit="MiB", log=2)
    style.label_axis(ax, "y", "perplexity", unit="lower is better", log=10)
    found = [perplexity for _, perplexity in data.points.values()]
    ticks = [tick for tick in _TICKS if 0.97 * min(found) <= tick <= 1.03 * max(found)]
    ax.set_yticks(ticks or [min(found), max(found)])
    ax.set_yticks([], minor=True)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.3g}")
    low, high = ax.get_xlim()
    ax.set_xlim(0.6 * low, 1.2 * high)
    _write_names(ax, data)


def _write_names(ax: Axes, data: QualityAndSize) -> None:
    """Write each way beside its point, no name on another one: where points are close, names are moved up."""
    figure = ax.figure
    highest: dict[bool, float] = {}  # of the names on one side
    smallest = min(size for size, _ in data.points.values())
    for name, (size, perplexity) in sorted(data.points.items(), key=lambda item: item[1][1]):
        left = size == smallest or name == "fp32"
        place = (size / 2**20, perplexity)
        height = float(ax.transData.transform(place)[1]) * 72 / figure.dpi  # in points
        others = highest.get(left, -_LINE) if size < data.points[data.baseline][0] else -_LINE
        there = max(height, others + _LINE)
        if size < data.points[data.baseline][0]:
            highest[left] = there
        shift, side = (-9 if left else 9, there - height + 2), "right" if left else "left"
        ax.annotate(name, place, xytext=shift, textcoords="offset points", ha=side, size=9)


def loss_by_measure(losses: Mapping[str, Mapping[str, float]]) -> LossByMeasure:
    """Return the losses; raises InvalidArgumentError where two models were measured by other measures."""
    found = {model: dict(each) for model, each in losses.items()}
    if len({tuple(each) for each in found.values()}) != 1:
        raise InvalidArgumentError(f"losses has other measures for {', '.join(found)}: measure all by the same.")
    return LossByMeasure(found)


def draw_loss_by_measure(ax: Axes, data: LossByMeasure, claim: tuple[float, float]) -> None:
    """Draw a group of bars for each measure, a bar a model, and the claimed range as a band. Changes `ax`.

    A model whose method came before is drawn lighter.
    """
    measures = list(next(iter(data.losses.values())))
    width = 0.8 / len(data.losses)
    ax.axvspan(*claim, color=style.tint(style.colour("limit"), 0.18), label=f"claimed: {claim[0]:g} to {claim[1]:g} %")
    ax.axvline(0, color="#888888", linewidth=1)
    seen: list[str] = []
    for number, (model, losses) in enumerate(data.losses.items()):
        concept = next((each for each in _CONCEPTS if model.startswith(each)), "baseline")
        strength = 1.0 if concept not in seen else 0.5
        seen.append(concept)
        places = [place + (number - (len(data.losses) - 1) / 2) * width for place in range(len(measures))]
        ax.barh(
            places, list(losses.values()), width * 0.9, color=style.tint(style.colour(concept), strength), label=model
        )
    ax.set_yticks(range(len(measures)), measures)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    style.label_axis(ax, "x", "lost", unit="%")
