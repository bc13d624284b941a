import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.occupancy import Occupancy, compare_occupancy
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.occupancy import OccupancyLine, draw_occupancy, occupancy_lines

PAGED = Occupancy("paged, scattered, block_size 4", 40, (0.9, 1.0), (3, 2), (1, 0))
RESERVED = Occupancy("max (16)", 40, (0.2, 0.3, 0.4), (1, 1, 1), (2, 1, 0))


def test_lines_have_what_was_counted() -> None:
    assert occupancy_lines([PAGED, RESERVED]) == [
        OccupancyLine("paged, scattered, block_size 4", "paged", (0.9, 1.0), (3, 2)),
        OccupancyLine("max (16)", "max", (0.2, 0.3, 0.4), (1, 1, 1)),
    ]
    assert [line.label for line in occupancy_lines([PAGED, RESERVED])] == [PAGED.name, "reserved: max (16)"]


def test_every_kind_of_the_comparison_has_a_line() -> None:
    lines = occupancy_lines(compare_occupancy([(5, 7), (3, 20), (9, 2)], 64, max_lens=(32,), block_size=4))
    assert [line.kind for line in lines] == ["paged", "max", "max", "power_of_two", "oracle"]
    assert all(0 < share <= 1 for line in lines for share in line.utilization)


def test_utilisation_above_in_percent_sequences_below() -> None:
    figure = draw_occupancy(occupancy_lines([PAGED, RESERVED, RESERVED]))
    top, bottom = figure.axes
    assert [list(line.get_ydata()) for line in top.lines][:2] == [[90, 100], pytest.approx([20, 30, 40])]
    assert [list(line.get_ydata()) for line in bottom.lines][:2] == [[3, 2], [1, 1, 1]]
    assert list(top.lines[1].get_xdata()) == [1, 2, 3]
    assert [line.get_color() for line in top.lines] == [style.colour(c) for c in ("paged", "naive", "naive")]
    assert [line.get_linestyle() for line in top.lines] == ["-", "-", "--"]  # two of one kind differ
    assert top.get_ylabel() == "utilisation (% of slots held)"
    assert (bottom.get_xlabel(), bottom.get_ylabel()) == ("step", "sequences in flight")
    plt.close(figure)


@pytest.mark.parametrize("wrong", [Occupancy("other", 4, (1.0,), (1,), (0,)), Occupancy("max (4)", 4, (), (), ())])
def test_what_has_no_line(wrong: Occupancy) -> None:
    with pytest.raises(InvalidArgumentError, match="occupancies has"):
        occupancy_lines([PAGED, wrong])
