import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.recompute import draw_recompute, recompute


@pytest.mark.parametrize(("prompt_len", "new_tokens"), [(1, 1), (4, 5), (1, 16), (7, 2)])
def test_counts_are_those_of_the_replayed_loop(prompt_len: int, new_tokens: int) -> None:
    data = recompute(prompt_len, new_tokens)
    assert data.computed_uncached == sum(range(prompt_len, prompt_len + new_tokens))
    assert data.computed_cached == prompt_len + new_tokens - 1
    assert [len(step) for step in data.cached] == [len(step) for step in data.uncached]


def test_every_position_is_computed_once_with_a_cache() -> None:
    steps = recompute(4, 5).cached
    for position in range(8):
        assert sum(len(step) > position and step[position] == "computed" for step in steps) == 1


def test_the_drawing_has_a_full_square_for_each_computed_position() -> None:
    figure, data = draw_recompute(3, 4)
    for ax, concept, count in (
        (figure.axes[0], "uncached", data.computed_uncached),
        (figure.axes[1], "cached", data.computed_cached),
    ):
        squares = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        full = [patch for patch in squares if to_hex(patch.get_facecolor()).upper() == style.colour(concept)]
        assert len(full) == count
        assert len(squares) == data.computed_uncached
        assert str(count) in ax.get_title() + ax.get_title(loc="left")
    plt.close(figure)


@pytest.mark.parametrize(("prompt_len", "new_tokens"), [(0, 3), (3, 0)])
def test_nothing_to_draw_is_refused(prompt_len: int, new_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        recompute(prompt_len, new_tokens)
