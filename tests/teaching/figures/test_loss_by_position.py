from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.loss_by_passage import draw_passage_loss, passage_loss
from vllm_teach.teaching.figures.loss_by_position import draw_loss_by_position, position_curves

FULL = torch.linspace(3, 2, 99, dtype=torch.float64)  # of the tokens 1 … 99
WORSE = FULL + (torch.arange(99) >= 39) * 0.5  # from token 40 on
PASSAGES = {"one": ((10, 20), (60, 70)), "two": ((22, 27), (80, 85))}


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_each_point_is_the_perplexity_of_the_tokens_up_to_it() -> None:
    data = position_curves({"causal": FULL, "sinks": WORSE}, width=10)
    assert data.positions.tolist() == list(range(10, 100))
    assert float(data.perplexity["causal"][0]) == pytest.approx(float(FULL[:10].mean().exp()))
    assert float(data.perplexity["causal"][-1]) == pytest.approx(float(FULL[-10:].mean().exp()))
    ratio = data.ratio("sinks")
    assert torch.allclose(ratio[data.positions < 40], torch.ones(1, dtype=torch.float64))
    assert float(ratio[data.positions == 40]) == pytest.approx(float(torch.tensor(0.05).exp()))
    assert data.ratio_between("sinks", 49, 100) == pytest.approx(float(torch.tensor(0.5).exp()))


@pytest.mark.parametrize("nlls", [{"sinks": FULL}, {"causal": FULL, "sinks": FULL[1:]}, {"causal": FULL[:5]}])
def test_what_cannot_be_compared(nlls) -> None:
    with pytest.raises(InvalidArgumentError, match="nlls has"):
        position_curves(nlls, width=10)


def test_the_lines_end_where_they_are_told_to() -> None:
    data = position_curves({"causal": FULL, "sinks": WORSE, "local_window": WORSE}, width=10)
    figure = draw_loss_by_position(data, window=40, end=70)
    upper, lower = figure.axes
    drawn = {line.get_label(): line for line in upper.lines}
    assert {"full causal", "4 sinks + window", "window of 512"} <= set(drawn)
    assert max(drawn["full causal"].get_xdata()) == 69
    assert upper.get_ylim()[0] == 0
    assert lower.get_ylim()[0] < 1
    vertical = [line.get_xdata()[0] for line in lower.lines if len(set(line.get_xdata())) == 1]
    assert vertical == [40]


def test_a_passages_loss_leaves_out_its_first_token() -> None:
    data = passage_loss({"causal": FULL, "sinks": WORSE}, PASSAGES)
    # tokens 11 … 19 have the indices 10 … 18
    assert data.first["one"] == pytest.approx(float(FULL[10:19].mean()))
    assert data.again["two"]["sinks"] == pytest.approx(float(WORSE[80:84].mean()))
    assert set(data.again["one"]) == {"causal", "sinks"}


def test_one_bar_for_each_reading() -> None:
    data = passage_loss({"causal": FULL, "sinks": WORSE}, PASSAGES)
    _, axes = plt.subplots()
    draw_passage_loss(axes, data)
    heights = sorted(patch.get_height() for patch in axes.patches)
    wanted = [*data.first.values(), *(loss for losses in data.again.values() for loss in losses.values())]
    assert heights == pytest.approx(sorted(wanted))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["one", "two"]
