from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.backward_tiles import backward_loop, draw_backward_tile


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_keys_are_the_outer_loop_and_hidden_tiles_are_left_out() -> None:
    data = backward_loop(6, 2)
    first, second, third = (0, 2), (2, 4), (4, 6)
    assert data.visits == (
        (first, first),
        (second, first),
        (third, first),
        (second, second),
        (third, second),
        (third, third),
    )


def test_progress_counts_the_tiles_so_far() -> None:
    data = backward_loop(6, 2)
    assert list(data.keys_done(4).values()) == [(3, 3), (1, 2), (0, 1)]
    assert list(data.rows_done(4).values()) == [(1, 1), (2, 2), (1, 3)]
    last = len(data.visits)
    for done in (data.keys_done(last), data.rows_done(last)):
        assert all(a == b for a, b in done.values())
    assert "tile 4 of 6: queries 2 to 3, keys 2 to 3" in data.describe(4)
    assert "dK and dV of 1 of 3 key tiles, dQ of 2 of 3 query tiles" in data.describe(4)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_one_tile_is_current_and_every_count_is_written(step: int) -> None:
    data = backward_loop(6, 2)
    figure = draw_backward_tile(data, step)
    (axes,) = figure.axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    fills = [to_hex(box.get_facecolor()).upper() for box in boxes]
    assert fills.count(style.colour("current")) == 1
    assert fills.count(style.colour("tiled")) == 6  # one piece each of Q, dO, lse, D, K and V
    texts = [text.get_text() for text in axes.texts]
    counts = [f"{a}/{b}" for a, b in (*data.rows_done(step).values(), *2 * list(data.keys_done(step).values()))]
    assert sorted(text for text in texts if "/" in text) == sorted(counts)


def test_the_strips_are_to_the_matrix_scale() -> None:
    data = backward_loop(512, 128, head_dim=64)
    (axes,) = draw_backward_tile(data, 3).axes
    of = {name: [box for box in axes.patches if box.get_gid() == name] for name in ("Q", "dQ", "K", "dV", "lse")}
    assert all(len(boxes) == 4 for boxes in of.values())
    matrix = 4 * of["K"][0].get_width()
    assert of["Q"][0].get_width() == pytest.approx(matrix * 64 / 512) == pytest.approx(of["dV"][0].get_height())
    assert of["Q"][0].get_height() == pytest.approx(of["K"][0].get_width())


@pytest.mark.parametrize("step", [0, 11])
def test_a_step_that_is_not_there_is_refused(step: int) -> None:
    with pytest.raises(InvalidArgumentError, match="use 1 to 10"):
        draw_backward_tile(backward_loop(512, 128), step)
