import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import PatchCollection

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.score_squares import draw_score_squares

CALLS = {"chat": (1, 300), "document": (1, 2048), "64 chats": (64, 300), "almost": (1, 1023), "just": (1, 1024)}


def test_scores_sides_and_verdicts() -> None:
    figure, data = draw_score_squares(CALLS)
    assert [data.scores(name) for name in CALLS] == [90_000, 4_194_304, 5_760_000, 1_046_529, 1_048_576]
    assert data.side("64 chats") == 2400
    assert {name: data.is_long(name) for name in CALLS} == {
        "chat": False,
        "document": True,
        "64 chats": True,
        "almost": False,
        "just": True,
    }
    plt.close(figure)


def test_the_squares_are_to_scale() -> None:
    figure, data = draw_score_squares({"64 chats": (64, 300)}, threshold=500)
    (ax,) = figure.axes
    (squares,) = [one for one in ax.collections if isinstance(one, PatchCollection)]
    boxes = [path.get_extents() for path in squares.get_paths()]
    assert len(boxes) == 64
    assert {(round(box.width), round(box.height)) for box in boxes} == {(300, 300)}
    assert len({(round(box.x0), round(box.y0)) for box in boxes}) == 64
    assert max(box.x1 for box in boxes) == pytest.approx(data.side("64 chats"))
    (limit,) = ax.patches
    assert limit.get_width() == limit.get_height() == 500
    assert ax.get_aspect() == 1.0
    plt.close(figure)


def test_no_calls() -> None:
    with pytest.raises(InvalidArgumentError, match="calls is empty"):
        draw_score_squares({})
