import hashlib
from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.merge_of_states import draw_merge, merge_data
from vllm_teach.teaching.figures.softmax_steps import describe_step, draw_softmax_step, softmax_steps

SCORES = [0.5, -1.0, 2.0, 1.0, 3.0, 0.0, -2.0]
VALUES = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def softmax_out(scores, values):
    weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
    return weights @ torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 9])
def test_every_state_is_the_softmax_of_the_keys_seen(tile):
    data = softmax_steps(SCORES, VALUES, tile)
    assert data.tiles == -(-7 // tile)
    for step in range(1, data.tiles + 1):
        seen = data.seen(step)
        assert data.m[step] == max(SCORES[:seen])
        torch.testing.assert_close(
            torch.tensor(data.out(step), dtype=torch.float64), softmax_out(SCORES[:seen], VALUES[:seen])
        )
        assert sum(data.weights(step, seen, data.m[step])) == pytest.approx(data.l[step])


def test_rescale_factors_follow_the_maximum():
    data = softmax_steps(SCORES, VALUES, 2)
    assert data.rescale[0] == 0.0
    assert data.rescale[1] == pytest.approx(torch.exp(torch.tensor(0.5 - 2.0)).item(), rel=1e-6)
    assert data.rescale[3] == 1.0


def test_the_readout_names_old_and_new_sum():
    data = softmax_steps([0.0, 0.0], [[1.0], [3.0]], 1)
    assert describe_step(data, 0) == "nothing seen: m = -inf, l = 0, acc = 0, out so far 0 (final 2.00)"
    assert describe_step(data, 2) == "m = 0.00, l = 1.00 x 1.00 + 1.00 = 2.00, out so far 2.00 (final 2.00)"


def test_each_step_is_another_picture():
    data = softmax_steps(SCORES, VALUES, 2)
    pictures = [style.to_png(draw_softmax_step(data, step)) for step in range(data.tiles + 1)]
    assert len({hashlib.sha256(png).hexdigest() for png in pictures}) == data.tiles + 1


def test_drawn_bars_are_the_data():
    data = softmax_steps(SCORES, VALUES, 2)
    scores, weights, sums, output = draw_softmax_step(data, 2).axes
    assert [bar.get_height() for bar in scores.containers[0]] == SCORES
    assert [bar.get_height() for bar in weights.containers[-1]] == data.weights(2, 4, data.m[2])
    assert sums.containers[0][0].get_height() + sums.containers[1][0].get_height() == pytest.approx(data.l[2])
    assert [bar.get_height() for bar in output.containers[0]] == data.out(2)


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="values 6"):
        softmax_steps(SCORES, VALUES[:6], 2)
    with pytest.raises(InvalidArgumentError, match="tile is 0"):
        softmax_steps(SCORES, VALUES, 0)
    with pytest.raises(InvalidArgumentError, match="step is 5"):
        draw_softmax_step(softmax_steps(SCORES, VALUES, 2), 5)


@pytest.mark.parametrize("split", range(1, 7))
def test_a_merge_at_any_cut_is_the_softmax_of_all_keys(split):
    data = merge_data(SCORES, VALUES, split)
    assert data.merged.out == pytest.approx(float(softmax_out(SCORES, VALUES)[0]), abs=1e-12)
    assert data.first.keys == (0, split)
    assert max(data.weights) == 1.0
    assert data.merged.l == pytest.approx(data.weights[0] * data.first.l + data.weights[1] * data.second.l)


def test_the_merge_is_drawn_with_its_numbers_inside_the_page():
    figure, data = draw_merge(SCORES, VALUES, 3)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert any(data.merged.describe() in text for text in texts)
    assert sum(text in {f"{score:.1f}" for score in SCORES} for text in texts) == 7
    figure.draw_without_rendering()
    page = figure.bbox
    assert all(page.contains(*corner) for text in figure.axes[0].texts for corner in text.get_window_extent().corners())


def test_a_cut_outside_the_row_is_refused():
    with pytest.raises(InvalidArgumentError, match="split is 7"):
        merge_data(SCORES, VALUES, 7)
