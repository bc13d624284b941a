import math
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.loss_curves import (
    LossCurve,
    draw_loss_curves,
    draw_training_losses,
    draw_training_record,
    running_means,
)


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_running_means_are_of_full_width() -> None:
    assert running_means([4, 2, 6, 0], 2) == pytest.approx([3, 4, 3])
    assert running_means([1, 2, 3], 3) == pytest.approx([2])
    assert running_means([1, 2, 3], 4) == []


def test_training_losses_alone() -> None:
    _, axes = plt.subplots()
    curves = {"float32": LossCurve([3.0, 2.0, 1.0], [], "float32"), "low": LossCurve([4.0, 3.0, 3.0], [], "bfloat16")}
    assert draw_training_losses(axes, curves, width=2) == {"float32": 1.5, "low": 3.0}
    assert [list(line.get_ydata()) for line in axes.lines] == [[2.5, 1.5], [3.5, 3.0]]
    assert list(axes.lines[0].get_xdata()) == [2, 3]


def test_the_right_panel_shows_the_distance_to_the_first_run() -> None:
    curves = {
        "float32": LossCurve([3.0, 2.0, 1.0], [(2, 2.5), (3, 2.0)], "float32"),
        "bfloat16": LossCurve([3.0, 2.1, 1.1], [(2, 2.6), (3, 2.25)], "bfloat16", dashed=True),
    }
    figure, data = draw_loss_curves(curves, width=1)
    assert data.final == {"float32": 2.0, "bfloat16": 2.25}
    assert data.above_first == pytest.approx({"float32": 0, "bfloat16": 0.25})
    left, right = figure.axes
    assert list(left.lines[1].get_ydata()) == pytest.approx([3.0, 2.1, 1.1])
    assert list(right.lines[1].get_ydata()) == pytest.approx([0.1, 0.25])
    assert right.lines[1].get_linestyle() == "--"
    assert right.get_ylim()[0] == pytest.approx(-right.get_ylim()[1])


def test_runs_that_were_evaluated_at_other_steps_are_refused() -> None:
    curves = {"a": LossCurve([1.0], [(1, 2.0)], "float32"), "b": LossCurve([1.0], [(2, 2.0)], "bfloat16")}
    with pytest.raises(InvalidArgumentError, match="other steps"):
        draw_loss_curves(curves)


def record(model: float) -> dict[str, Any]:
    losses = {"model": model, "kneser_ney": 4.2, "modified_kneser_ney": 4.1}
    return {
        "parameters": 3_200_000,
        "curve": {"steps_per_entry": 10, "train": [7.0, 5.0, 4.0], "dev": [[10, 5.5], [30, 4.3]]},
        "losses_in_nats_per_token": {"dev": losses, "validation": losses},
    }


def test_the_records_curve_and_bars() -> None:
    figure, data = draw_training_record(record(3.5), vocab_size=2048)
    assert data.validation["uniform guess"] == pytest.approx(math.log(2048))
    assert data.lead == pytest.approx(0.6)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [10, 20, 30]
    assert list(left.lines[1].get_ydata()) == [5.5, 4.3]
    assert [bar.get_width() for bar in right.patches] == list(data.validation.values())
    assert "the model beats the trigrams" in figure.get_suptitle()


def test_a_model_that_loses_is_said_to_lose() -> None:
    figure, data = draw_training_record(record(4.15), vocab_size=2048)
    assert data.lead < 0
    assert "does not beat" in figure.get_suptitle()
