import matplotlib.pyplot as plt
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.warp_sum import draw_warp_sum, warp_sum

ROW = [2, 4, 4, 4, 5, 5, 7, 9]


def test_every_thread_ends_with_the_sum() -> None:
    data = warp_sum(ROW)
    assert data.distances == (4, 2, 1)
    assert data.rows[1] == (7, 9, 11, 13, 7, 9, 11, 13)
    assert set(data.rows[-1]) == {sum(ROW)} == {data.total}
    assert len(warp_sum(range(32)).distances) == 5


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], range(12)])
def test_threads_are_a_power_of_two(values) -> None:
    with pytest.raises(InvalidArgumentError, match="power of two"):
        warp_sum(values)


def test_what_is_drawn() -> None:
    _, ax = plt.subplots()
    data = draw_warp_sum(ax, warp_sum(ROW))
    shown = [text.get_text() for text in ax.texts]
    assert [text for text in shown if text.isdigit()] == [f"{value:g}" for row in data.rows for value in row]
    assert len(ax.patches) == 8 * 4
    assert {"thread 0", "thread 7", "distance 4", "distance 1"} <= set(shown)
