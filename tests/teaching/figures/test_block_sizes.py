import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.kvcache.occupancy import PagedMemory, simulate_occupancy
from vllm_teach.teaching.figures.block_sizes import draw_block_sizes, sweep_block_sizes


def test_the_sweep_is_the_simulation_at_each_size() -> None:
    lengths = [(prompt % 90 + 1, output % 120 + 1) for prompt, output in SHAREGPT.draw(60, seed=2)]
    points = sweep_block_sizes(lengths, 1024, [1, 4, 32])
    for point in points:
        result = simulate_occupancy(lengths, PagedMemory(1024, point.block_size))
        assert (point.utilization, point.in_flight) == (result.mean_utilization, result.mean_in_flight)
    assert points[0].utilization == 1
    assert points[0].blocks_per_sequence == pytest.approx(sum(map(sum, lengths)) / 60)
    assert points[1].utilization > points[2].utilization
    assert points[1].blocks_per_sequence > points[2].blocks_per_sequence


def test_two_sequences_by_hand() -> None:
    # 6 and 4 tokens in blocks of 4, one at a time: two blocks and one.
    assert sweep_block_sizes([(5, 1), (3, 1)], 8, [4])[0].blocks_per_sequence == 1.5


def test_the_lines_are_the_points() -> None:
    points = sweep_block_sizes([(5, 3)] * 6, 32, [2, 4, 8])
    figure = draw_block_sizes(points, {4: "here"})
    waste, blocks = figure.axes
    assert list(waste.lines[0].get_xdata()) == [2, 4, 8]
    assert list(waste.lines[0].get_ydata()) == pytest.approx([100 * (1 - point.utilization) for point in points])
    assert list(blocks.lines[0].get_ydata()) == [4, 2, 1]
    assert [line.get_xdata()[0] for line in waste.lines[1:]] == [4]
    plt.close(figure)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="points is empty"):
        draw_block_sizes([])
