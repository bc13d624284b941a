import matplotlib.pyplot as plt
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.sharing import Sharing
from vllm_teach.teaching.figures.blocks_saved import draw_blocks_held, draw_saved_blocks, saved_blocks

RUN = Sharing(listed=[4, 8], held=[3, 3], copies=1)


def test_the_share_is_that_of_all_steps() -> None:
    assert RUN.saved == 0.5
    assert saved_blocks([2], {"sampling": [RUN]}).saved == {"sampling": (0.5,)}


@pytest.mark.parametrize("runs", [{"greedy": [RUN]}, {"sampling": [RUN, RUN]}])
def test_unknown_names_and_missing_runs_are_refused(runs) -> None:
    with pytest.raises(InvalidArgumentError, match="use the names beam search, sampling"):
        saved_blocks([2], runs)


def test_a_line_for_each_way_and_a_band_of_the_paper() -> None:
    _, ax = plt.subplots()
    draw_saved_blocks(ax, saved_blocks([2, 4], {"beam search": [RUN, RUN], "sampling": [RUN, Sharing()]}))
    assert [list(line.get_ydata()) for line in ax.lines] == [[50, 50], [50, 0]]
    bands = [(patch.get_y(), patch.get_y() + patch.get_height()) for patch in ax.patches]
    assert bands == [pytest.approx((37.6, 55.2)), pytest.approx((6.1, 9.8))]
    plt.close()


def test_held_and_listed_step_by_step() -> None:
    _, ax = plt.subplots()
    draw_blocks_held(ax, RUN)
    assert [list(line.get_ydata()) for line in ax.lines] == [[4, 8], [3, 3]]
    plt.close()
