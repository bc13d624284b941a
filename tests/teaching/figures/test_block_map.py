import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from vllm_teach.engine.events import EventLog, Scheduled, StepEnded
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.events import Allocated, Freed, Shared
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.block_map import BlockMap, block_map, draw_block_map

ENDED = StepEnded(0, 0, 20, 1, 0, 0)


def small_log() -> EventLog:
    """Steps 2, 3 and 5: sequence 4 holds blocks 1 and 0, sequence 9 joins at block 1 and stays."""
    log = EventLog(clock=lambda: 0.0)
    for step, events in {
        2: [Allocated(4, (1, 0)), Scheduled(4, 0, 8), ENDED],
        3: [Shared(9, (1,)), Scheduled(4, 8, 1), Scheduled(9, 4, 1), Freed(4, (0, 1)), ENDED],
        4: [],
        5: [Allocated(9, (2,)), Scheduled(9, 5, 1), ENDED],
    }.items():
        log.step = step
        for event in events:
            log.record(event)
    return log


def test_holders_by_step_and_block() -> None:
    data = block_map(small_log(), 4, {9: "B"})
    assert data == BlockMap(
        (2, 3, 5),
        4,
        (((4,), (4,), (), ()), ((4,), (4, 9), (), ()), ((), (9,), (9,), ())),
        {4: "sequence 4", 9: "B"},
    )
    assert data.num_held == (2, 2, 2)
    assert data.num_shared == (0, 1, 0)


def test_a_cell_has_its_sequences_colour_and_a_dot_if_it_is_shared() -> None:
    figure = draw_block_map(block_map(small_log(), 4))
    [ax] = figure.axes
    [image] = ax.images
    picture = np.asarray(image.get_array())
    first, second, free = style.sequence_fill(0), style.sequence_fill(1), style.PAPER
    drawn = [[to_hex(cell).upper() for cell in row] for row in picture]
    assert drawn == [
        [first, first, free, free],  # step 4 planned nothing
        [first, first, free, second],
        [free, free, free, second],
        [free, free, free, free],
    ]
    assert list(image.get_extent()) == [1.5, 5.5, 3.5, -0.5]
    assert ax.collections[0].get_offsets().tolist() == [[3, 1]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["sequence 4", "sequence 9", "shared"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "physical block")
    plt.close(figure)


def test_one_label_is_one_colour_and_many_labels_have_no_legend() -> None:
    holders = (tuple((seq_id,) for seq_id in range(10)),)
    figure, (left, right) = plt.subplots(1, 2)
    draw_block_map(BlockMap((1,), 10, holders, dict.fromkeys(range(10), "A")), left)
    assert len({tuple(cell) for cell in np.asarray(left.images[0].get_array())[:, 0]}) == 1
    assert len(left.get_legend().get_texts()) == 1
    draw_block_map(BlockMap((1,), 10, holders, {i: f"{i}" for i in range(10)}), right)
    assert right.get_legend() is None
    plt.close(figure)


def test_a_pool_too_small_and_a_log_without_a_step() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks=2 is too few: block 2 was held"):
        block_map(small_log(), 2)
    with pytest.raises(InvalidArgumentError, match="log has no step"):
        block_map(EventLog(), 2)
