import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.paged_read import PagedRead
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.paged_reads import draw_paged_reads

READ = PagedRead("sdpa", (4, 16), (1e-3, 2e-3), (3e-3, 4e-3), (3.0, 2.0))


def test_solid_is_one_run_and_dashed_is_scattered() -> None:
    figure = draw_paged_reads([READ])
    one_run, scattered = figure.axes[0].lines
    assert (list(one_run.get_ydata()), one_run.get_linestyle()) == ([1e-3, 2e-3], "-")
    assert (list(scattered.get_ydata()), scattered.get_linestyle()) == ([3e-3, 4e-3], "--")
    assert one_run.get_color() == scattered.get_color() == style.colour("sdpa")
    assert figure.axes[0].get_ylim()[0] == 0
    plt.close(figure)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="reads is empty"):
        draw_paged_reads([])
