from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.softmax_gradient import draw_softmax_gradient, softmax_gradient


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_the_lessons_row() -> None:
    data = softmax_gradient([2, 1, 8, 4], [15, 0, 30, 45])
    assert data.average == pytest.approx(30)
    assert data.ds == pytest.approx((-2, -2, 0, 4))


def test_it_is_autograds_gradient() -> None:
    scores = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    dp = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad(torch.softmax(scores, 0), scores, dp)
    data = softmax_gradient(scores.detach().exp().tolist(), dp.tolist())
    assert data.ds == pytest.approx(exact.tolist())
    assert sum(data.ds) == pytest.approx(0)


def test_the_bars_are_the_data_and_the_tiles_have_two_colours() -> None:
    figure, data = draw_softmax_gradient([2, 1, 8, 4], [15, 0, 30, 45], tile=2)
    heights = [[bar.get_height() for bar in ax.patches] for ax in figure.axes]
    assert heights == [list(data.probabilities), list(data.dp), list(data.ds)]
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert [line.get_ydata()[0] for line in figure.axes[1].lines] == [data.average]


@pytest.mark.parametrize(("weights", "dp"), [([], []), ([1, 2], [1])])
def test_unequal_lists_are_refused(weights: list[float], dp: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="one of each for a key"):
        softmax_gradient(weights, dp)
