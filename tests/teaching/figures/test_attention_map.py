from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.attention_map import attention_map_data, draw_attention_map

WORDS = ("The", " red", " red")
PROBS = torch.tensor([[1.0, 0.0, 0.0], [0.96, 0.04, 0.0], [0.2, 0.7, 0.1]])


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_each_query_names_the_key_it_reads_most() -> None:
    data = attention_map_data(WORDS, PROBS)
    assert data.read_most == (0, 0, 1)
    word, weight = data.most(-1)
    assert word == "red"
    assert weight == pytest.approx(0.7)


def test_the_picture_holds_the_weights_and_writes_the_large_ones() -> None:
    figure, _ = draw_attention_map(WORDS, PROBS, title="a head", mark=(2, 1))
    axes = figure.axes[0]
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array().data), PROBS)
    assert sorted(text.get_text() for text in axes.texts) == ["10", "100", "20", "70", "96"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["The", "red", "red"]


def test_only_hidden_cells_are_hatched() -> None:
    figure, _ = draw_attention_map(WORDS, PROBS, title="a head")
    (hidden,) = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    inside = [[bool(hidden.get_path().contains_point((key, query))) for key in range(3)] for query in range(3)]
    assert inside == [[False, True, True], [False, False, True], [False, False, False]]


def test_probabilities_must_fit_the_words() -> None:
    with pytest.raises(InvalidArgumentError, match="2 words need"):
        attention_map_data(WORDS[:2], PROBS)
