import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.time_per_token import draw_time_per_token

UNCACHED = {256: 0.8, 16: 0.1, 64: 0.2}
CACHED = {16: 0.05, 64: 0.06, 256: 0.08}


def test_both_lines_show_the_data_in_their_colours() -> None:
    figure, data = draw_time_per_token(UNCACHED, CACHED)
    lines = {line.get_gid(): line for line in figure.axes[0].lines}
    for concept, seconds in (("uncached", UNCACHED), ("cached", CACHED)):
        assert list(lines[concept].get_xdata()) == [16, 64, 256]
        assert list(lines[concept].get_ydata()) == [seconds[n] for n in (16, 64, 256)]
        assert lines[concept].get_color() == style.colour(concept)
    assert data.uncached_growth == pytest.approx(8)
    assert data.cached_growth == pytest.approx(1.6)
    assert data.advantage == pytest.approx(10)
    plt.close(figure)


def test_axes_start_at_zero_and_name_their_units() -> None:
    figure, data = draw_time_per_token(UNCACHED)
    ax = figure.axes[0]
    assert (ax.get_xlim()[0], ax.get_ylim()[0]) == (0, 0)
    assert ax.get_xlabel() == "text so far (tokens)"
    assert data.advantage is None
    assert len(ax.lines) == 1
    plt.close(figure)


def test_labels_stay_above_the_axis() -> None:
    style.apply()
    figure, _ = draw_time_per_token(UNCACHED, dict.fromkeys(UNCACHED, 0.001))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    for text in ax.texts:
        assert text.get_window_extent().y0 >= ax.bbox.y0
        assert text.get_window_extent().x1 <= figure.bbox.x1
    plt.close(figure)


@pytest.mark.parametrize(("uncached", "cached"), [({16: 1.0}, None), (UNCACHED, {16: 1.0, 64: 1.0})])
def test_lengths_must_be_enough_and_the_same(uncached: dict[int, float], cached: dict[int, float] | None) -> None:
    with pytest.raises(InvalidArgumentError, match="lengths"):
        draw_time_per_token(uncached, cached)
