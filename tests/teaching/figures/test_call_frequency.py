from itertools import pairwise

import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.call_frequency import draw_call_frequency


def test_segments_add_up_and_do_not_overlap() -> None:
    counts = {"T4": {"sdpa": 10}, "A100": {"sdpa": 3, "flash_attn": 7}}
    figure, data = draw_call_frequency(counts, "a title")
    assert {machine: dict(calls) for machine, calls in data.items()} == counts
    (ax,) = figure.axes
    bars = [bar for container in ax.containers for bar in container if bar.get_width()]
    for row, total in enumerate((10, 10)):
        ends = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars if round(bar.get_y() + 0.33) == row)
        assert ends[0][0] == 0
        assert ends[-1][1] == total
        assert all(end == start for (_, end), (start, _) in pairwise(ends))
    assert ax.get_legend_handles_labels()[1] == ["sdpa", "flash_attn"]
    plt.close(figure)


@pytest.mark.parametrize("counts", [{}, {"T4": {}}, {"T4": {"sdpa": 0}}], ids=["none", "empty", "zero"])
def test_nothing_to_draw(counts: dict[str, dict[str, int]]) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one call"):
        draw_call_frequency(counts, "a title")
