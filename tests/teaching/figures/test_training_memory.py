from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import MemoryTrace, trace_memory
from vllm_teach.performance.memory import MemoryStep, region
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.training_memory import REGIONS, draw_timelines, timeline


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def trace(*steps: tuple[str, int]) -> MemoryTrace:
    """A trace of (region, bytes) steps."""
    live, made = 0, []
    for name, delta in steps:
        live += delta
        made.append(MemoryStep("op", name, delta, live))
    return MemoryTrace(tuple(made), max(step.live for step in made), {}, {})


def test_what_is_kept_is_what_is_alive_between_the_passes() -> None:
    data = timeline(trace(("forward", 10), ("forward", 5), ("outside", -10), ("backward", 7), ("backward", -12)))
    assert data.kept == 5
    assert data.peak == 15
    assert data.live == (0, 10, 15, 5, 12, 0)
    assert data.place == pytest.approx((0, 1 / 3, 2 / 3, 1, 1.5, 2))


def test_a_real_step_keeps_its_product() -> None:
    a = torch.randn(256, 256, requires_grad=True)

    def step() -> None:
        with region("forward"):
            out = (a @ a).exp()
        with region("backward"):
            torch.autograd.grad(out.sum(), a)

    data = timeline(trace_memory(step, REGIONS))
    assert data.kept == 256 * 256 * 4  # exp's result, which its derivative needs; the product itself is gone
    assert data.peak >= 2 * data.kept


def test_without_regions_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="mark both"):
        timeline(trace(("forward", 10), ("outside", -10)))


def test_the_lines_are_the_data() -> None:
    _, axes = plt.subplots()
    data = draw_timelines(
        axes,
        {
            "naive": trace(("forward", 900), ("backward", 300), ("backward", -1200)),
            "tiled": trace(("forward", 40), ("backward", -40)),
        },
    )
    drawn = {line.get_label(): tuple(line.get_ydata()) for line in axes.lines}
    assert drawn["naive: peak"] == data["naive"].live
    assert drawn["tiled: peak"] == data["tiled"].live
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["naive: 900 B", "tiled: 40 B"]
