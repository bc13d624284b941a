import math
from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.attention_by_hand import by_hand_data, draw_by_hand

Q = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 1]])
K = torch.tensor([[0, 0], [0, 1], [1, 2], [2, 0]])
V = torch.tensor([[8, 0], [0, 8], [0, 4], [0, 8]])


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_the_numbers_are_those_of_a_pencil() -> None:
    data = by_hand_data(Q, K, V, scale=math.log(2))
    assert data.products.tolist() == [[0, 1, 3, 2], [0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 2, 0]]
    eighths = torch.tensor([[8, 0, 0, 0], [4, 4, 0, 0], [2, 2, 4, 0], [1, 2, 4, 1]], dtype=torch.float64)
    torch.testing.assert_close(data.probs * 8, eighths)
    torch.testing.assert_close(data.out, torch.tensor([[8, 0], [4, 4], [2, 4], [1, 5]], dtype=torch.float64))
    assert data.visible.tolist() == (eighths > 0).tolist()


def test_without_a_mask_every_key_is_visible() -> None:
    data = by_hand_data(Q, K, V, scale=math.log(2), causal=False)
    assert bool(data.visible.all())
    assert data.probs[0].tolist() == pytest.approx([1 / 15, 2 / 15, 8 / 15, 4 / 15])


def test_every_visible_number_is_written_and_hidden_cells_are_empty() -> None:
    figure, data = draw_by_hand(Q, K, V, scale=math.log(2), scale_name="ln 2")
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("1/8") == 2
    assert texts.count("1/2") == 4
    assert "S = ln 2 · QKᵀ" in " ".join(texts)
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == 2 * int((~data.visible).sum())
