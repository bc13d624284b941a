"""What others measured on A100s beside what our simulator expects of the same runs: is the model to be trusted?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.modelled_claims import Reading
from vllm_teach.validation.published_runs import PublishedRun

_LOOKS = {
    "lmdeploy": ("tiled", "o"),
    "TensorRT-LLM": ("sdpa", "s"),
    "vLLM": ("paged", "D"),
    "transformers": ("naive", "^"),
}


@dataclass(frozen=True)
class Pair:
    """A run's published and modelled output tokens a second."""

    run: PublishedRun
    modelled: float

    @property
    def ratio(self) -> float:
        """Modelled / published: above 1 the model promises more."""
        return self.modelled / self.run.tokens_per_s


def pair_runs(runs: Sequence[PublishedRun]) -> tuple[Pair, ...]:
    """Simulate each run. Some tenths of a second each."""
    return tuple(Pair(run, run.modelled()) for run in runs)


def draw_pairs(pairs: Sequence[Pair], claimed: Reading, modelled: Reading, *, title: str) -> Figure:
    """Draw a mark for each run, and two for the article's claim; on the line, what was measured was modelled."""
    figure, ax = plt.subplots(figsize=(7.0, 4.6))
    ends = (15.0, 4000.0)
    for factor, dash, place in ((1, "-", 55.0), (2, ":", 200.0), (4, "--", 300.0)):
        ax.plot(ends, [end / factor for end in ends], color=style.colour("baseline"), linestyle=dash, linewidth=1)
        ax.text(
            place, 1.04 * place / factor, "as modelled" if factor == 1 else f"1/{factor} of it", va="bottom", size=9,
            rotation=math.degrees(math.atan(1 / factor)), rotation_mode="anchor", transform_rotates_text=True,
            color=style.QUIET_INK,
        )  # fmt: skip
    for system in dict.fromkeys(pair.run.system for pair in pairs):
        concept, marker = _LOOKS[system]
        of = [pair for pair in pairs if pair.run.system == system]
        ax.plot(
            [pair.modelled for pair in of], [pair.run.tokens_per_s for pair in of], marker, label=system,
            color=style.colour(concept),
        )  # fmt: skip
    ax.plot(
        [modelled.baseline, modelled.optimised], [claimed.baseline, claimed.optimised], "X", markersize=10,
        color=style.colour("limit"), label="article A",
    )  # fmt: skip
    for name in ("baseline", "optimised"):
        point = (getattr(modelled, name), getattr(claimed, name))
        ax.annotate(name, point, xytext=(8, -12), textcoords="offset points", size=9.5, color=style.colour("limit"))
    ax.set(xlim=ends, ylim=ends)
    style.label_axis(ax, "x", "modelled", unit="output tokens/s", log=10)
    style.label_axis(ax, "y", "published", unit="output tokens/s", log=10)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9.5, columnspacing=1.2, handletextpad=0.3)
    ax.set_title(title)
    return figure
