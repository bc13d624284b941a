import math

import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.token_bars import draw_next_token, draw_temperatures, top_tokens

NAMES = [" a", " b", " c", " d", " e", " f"]
LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], dtype=torch.float64))


def decode(ids: list[int]) -> str:
    return "".join(NAMES[token_id] for token_id in ids)


def test_the_top_is_ordered_and_the_rest_completes_it() -> None:
    data = top_tokens(LOGITS, decode, top=3)
    assert [text for text, _ in data.tokens] == [" b", " d", " e"]
    assert [share for _, share in data.tokens] == pytest.approx([0.4, 0.25, 0.15])
    assert data.rest == pytest.approx(0.2)
    assert data.rest_count == 3


def test_temperature_divides_the_logits() -> None:
    shares = [0.05, 0.4, 0.1, 0.25, 0.15, 0.05]
    for temperature in (0.5, 2.0):
        powered = [share ** (1 / temperature) for share in shares]
        data = top_tokens(LOGITS, decode, top=2, temperature=temperature)
        assert data.tokens[0][1] == pytest.approx(powered[1] / math.fsum(powered))
        assert data.tokens[1][1] == pytest.approx(powered[3] / math.fsum(powered))


def test_bars_have_the_lengths_of_the_data() -> None:
    figure, data = draw_next_token(LOGITS, decode, top=3)
    bars = [patch.get_width() for patch in figure.axes[0].patches]
    assert bars == pytest.approx([*[share for _, share in data.tokens], data.rest])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["\u2423b", "\u2423d", "\u2423e", "3 others"]
    assert figure.axes[0].get_title(loc="left") or figure.axes[0].get_title()
    plt.close(figure)


def test_panels_share_order_and_scale() -> None:
    style.apply()
    figure, data = draw_temperatures(LOGITS, decode, (0.5, 1.0, 2.0), top=3)
    assert [[text for text, _ in shown.tokens] for shown in data.values()] == [[" b", " d", " e"]] * 3
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    best = [shown.tokens[0][1] for shown in data.values()]
    assert best == sorted(best, reverse=True)
    figure.draw_without_rendering()
    for ax in figure.axes:
        for text in ax.texts:  # a number must not run out of its panel
            assert text.get_window_extent().x1 <= figure.bbox.x1
    plt.close(figure)


@pytest.mark.parametrize(("top", "temperature"), [(0, 1.0), (6, 1.0), (2, 0.0)])
def test_arguments_that_cannot_work_are_refused(top: int, temperature: float) -> None:
    with pytest.raises(InvalidArgumentError):
        top_tokens(LOGITS, decode, top, temperature)
