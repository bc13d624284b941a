"""Lesson 12's figures, by their data."""

from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.fit import Residual
from vllm_teach.performance.cost_model.operators import Operators
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.hardware import HardwareSpec, get_hardware
from vllm_teach.performance.model_shapes import get_model_shape
from vllm_teach.performance.simulator.capacity import Capacity, Objective, Trial
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.capacity_knee import draw_capacity_knee, growth
from vllm_teach.teaching.figures.fit_scatter import draw_fit_scatter, median_error, share_within
from vllm_teach.teaching.figures.operator_roofline import decode_on_roof, draw_decode_on_roof
from vllm_teach.teaching.figures.prediction_dots import draw_predictions, prediction_ratios
from vllm_teach.teaching.figures.what_if_panels import WhatIf, draw_what_if


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


@pytest.fixture
def round_numbers() -> HardwareSpec:
    """A device with a ridge at 100 FLOP per byte."""
    return replace(get_hardware("a100-80gb-sxm"), peak={"bfloat16": 100e12}, memory_bandwidth=1e12)


def operators() -> Operators:
    return Operators(get_model_shape("llama-3-8b"))


class TestDecodeOnRoof:
    def test_products_by_hand(self, round_numbers: HardwareSpec) -> None:
        config = get_model_shape("llama-3-8b")
        weights = config.num_layers * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
        part = decode_on_roof(operators(), round_numbers, 2, 10).part("matrix products")
        assert part.flops == 2 * 2 * weights
        assert 2 * weights < part.num_bytes < 2.01 * weights  # and a little for the activations
        assert part.seconds == pytest.approx(part.num_bytes / 1e12)

    def test_attention_by_hand(self, round_numbers: HardwareSpec) -> None:
        part = decode_on_roof(operators(), round_numbers, 3, 1000).part("attention")
        assert part.flops == 32 * 3 * 1000 * 32 * 128 * 4
        assert part.intensity == pytest.approx(4, rel=0.01)  # four query heads a key head, two bytes a number

    def test_the_batch_moves_products_over_the_ridge_and_leaves_attention(self, round_numbers: HardwareSpec) -> None:
        few, many = (decode_on_roof(operators(), round_numbers, batch, 1000) for batch in (8, 400))
        assert few.ridge == 100
        assert (few.limit_of("matrix products"), many.limit_of("matrix products")) == ("memory", "arithmetic")
        assert few.part("attention").intensity == pytest.approx(many.part("attention").intensity)
        assert many.part("attention").seconds == pytest.approx(50 * few.part("attention").seconds)

    def test_the_parts_have_all_the_work(self, round_numbers: HardwareSpec) -> None:
        data = decode_on_roof(operators(), round_numbers, 5, 7)
        work = operators().work(StepShape(5, 5, 5, 5, 35))
        assert sum(part.num_bytes for part in data.parts) == pytest.approx(sum(w.num_bytes for w in work.values()))
        assert sum(part.flops for part in data.parts) == sum(w.flops for w in work.values())
        assert data.part("all else").flops == 0
        assert data.seconds == pytest.approx(sum(part.seconds for part in data.parts))

    def test_a_sliding_window_ends_the_growth(self, round_numbers: HardwareSpec) -> None:
        mistral = Operators(get_model_shape("mistral-7b"))
        short, long = (decode_on_roof(mistral, round_numbers, 1, context) for context in (4096, 20_000))
        assert short.part("attention") == long.part("attention")

    def test_it_is_drawn_as_it_is(self, round_numbers: HardwareSpec) -> None:
        data = decode_on_roof(operators(), round_numbers, 8, 1000)
        roof, bar = draw_decode_on_roof(data, title="drawn").axes
        dots = [line for line in roof.lines if line.get_marker() == "o"]
        assert [float(line.get_xdata()[0]) for line in dots] == [part.intensity for part in data.parts[:2]]
        assert [float(line.get_ydata()[0]) for line in dots] == [1e12 * part.intensity for part in data.parts[:2]]
        assert [patch.get_width() for patch in bar.patches] == pytest.approx([1e3 * p.seconds for p in data.parts])
        assert "modelled" in bar.get_xlabel()


class TestPredictions:
    def test_ratios(self) -> None:
        assert prediction_ratios([2.0, 3.0], {"a": [1.0, 6.0]}) == {"a": (2.0, 0.5)}

    def test_one_prediction_for_each_step(self) -> None:
        with pytest.raises(InvalidArgumentError, match="'a'"):
            prediction_ratios([2.0, 3.0], {"a": [1.0]})
        with pytest.raises(InvalidArgumentError, match="at most 3"):
            prediction_ratios([2.0], dict.fromkeys("abcd", (1.0,)))

    def test_it_is_drawn_as_it_is(self) -> None:
        (ax,) = draw_predictions(["x", "y"], [2.0, 3.0], {"a": [1.0, 6.0]}, title="drawn").axes
        lines = {str(line.get_label()): list(line.get_xdata()) for line in ax.lines}
        assert (lines["measured"], lines["a"]) == ([2.0, 3.0], [1.0, 6.0])
        assert [label.get_text() for label in ax.get_yticklabels()] == ["x", "y"]
        assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first step is on top


def residual(measured: float, modelled: float) -> Residual:
    return Residual("m", "s", StepShape(1, 1, 1), measured, measured, measured, modelled)


class TestFitScatter:
    POINTS = (residual(1.0, 1.1), residual(2.0, 1.0), residual(4.0, 4.8))

    def test_errors(self) -> None:
        assert median_error(self.POINTS) == pytest.approx(0.2)
        assert share_within(self.POINTS) == pytest.approx(1 / 3)
        assert share_within(self.POINTS, 0.5) == 1

    def test_it_is_drawn_as_it_is(self) -> None:
        (ax,) = draw_fit_scatter(self.POINTS[:2], self.POINTS[2:], title="drawn").axes
        lines = {str(line.get_label()): line for line in ax.lines}
        assert list(lines["fitted to"].get_xdata()) == [1.0, 2.0]
        assert list(lines["fitted to"].get_ydata()) == [1.1, 1.0]
        assert list(lines["never seen"].get_xdata()) == [4.0]
        assert ax.get_xlim() == ax.get_ylim()


class TestWhatIf:
    def test_change(self) -> None:
        panel = WhatIf("t", "s", ("1", "2"), "m", {"a": (2.0, 3.0), "b": (4.0, 1.0)})
        assert (panel.change(), panel.change("b")) == (1.5, 0.25)

    def test_one_value_for_each_choice(self) -> None:
        with pytest.raises(InvalidArgumentError, match="2 choices"):
            WhatIf("t", "s", ("1", "2"), "m", {"a": (2.0,)})
        for lines in ({}, dict.fromkeys("abc", (1.0, 2.0))):
            with pytest.raises(InvalidArgumentError, match="one or two"):
                WhatIf("t", "s", ("1", "2"), "m", lines)

    def test_it_is_drawn_as_it_is(self) -> None:
        panels = [
            WhatIf("first", "s", ("1", "2"), "m", {"a": (2.0, 3.0)}),
            WhatIf("second", "s", ("1", "2", "3"), "m", {"a": (2.0, 3.0, 4.0), "b": (1.0, 1.0, 5.0)}),
            WhatIf("third", "s", ("1",), "m", {"a": (2.0,)}),
        ]
        axes = draw_what_if(panels, title="drawn").axes
        assert [patch.get_height() for patch in axes[0].patches] == [2.0, 3.0]
        assert [patch.get_height() for patch in axes[1].patches] == [2.0, 3.0, 4.0, 1.0, 1.0, 5.0]
        assert all(ax.get_ylim()[0] == 0 for ax in axes[:3])
        assert not axes[3].get_visible()
        assert [text.get_text() for text in axes[0].texts] == ["2", "3"]


class TestCapacityKnee:
    TRIALS = (Trial(4.0, (8.0,), False), Trial(1.0, (1.0,), True), Trial(2.0, (2.0,), True))

    def test_growth_in_order_of_rates(self) -> None:
        assert growth(self.TRIALS) == [2.0, 4.0]

    def test_it_is_drawn_as_it_is(self) -> None:
        capacity = Capacity(2.0, 4.0, 5.0, 1.0, (Objective("ttft", 3.0),), 100, self.TRIALS)
        (ax,) = draw_capacity_knee(self.TRIALS, capacity, title="drawn", longer=self.TRIALS[:1]).axes
        lines = {str(line.get_label()): line for line in ax.lines}
        assert list(lines["100 requests"].get_xdata()) == [1.0, 2.0, 4.0]
        assert list(lines["100 requests"].get_ydata()) == [1.0, 2.0, 8.0]
        assert list(lines["a longer run"].get_ydata()) == [8.0]
        texts = {text.get_text().strip() for text in ax.texts}
        assert texts == {"limit 3 s", "capacity 2 a second"}
        assert "modelled" in ax.get_ylabel()

    def test_without_a_longer_run_there_is_one_line(self) -> None:
        capacity = Capacity(2.0, 4.0, 5.0, 1.0, (Objective("ttft", 3.0),), 100, self.TRIALS)
        (ax,) = draw_capacity_knee(self.TRIALS, capacity, title="drawn").axes
        assert [str(line.get_label()) for line in ax.lines if line.get_marker() == "s"] == []
