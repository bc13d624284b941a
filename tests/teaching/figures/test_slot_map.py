from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from vllm_teach.kvcache.occupancy import PagedMemory, ReservedMemory
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.slot_map import FREE, at_step, draw_slot_maps, slot_history

LENGTHS = [(4, 3), (3, 1), (5, 1)]


def test_a_reservation_slot_by_slot() -> None:
    first = slot_history([(4, 2), (3, 1)], ReservedMemory(25, "max", 10))[0]
    assert first.owners == (0,) * 10 + (1,) * 10 + (FREE,) * 5
    assert first.stored == (True,) * 4 + (False,) * 6 + (True,) * 3 + (False,) * 12
    assert (first.in_flight, first.share_stored, first.share_held) == (2, 7 / 25, 20 / 25)
    assert first.block_size is None


def test_paging_block_by_block() -> None:
    # Three blocks of 4; sequence 0's second block is 2, behind sequence 1's.
    history = slot_history(LENGTHS, PagedMemory(12, 4, watermark=0), 4)
    assert [each.step for each in history] == [1, 2, 3, 4]
    assert history[0].owners == (0,) * 4 + (1,) * 4 + (FREE,) * 4
    assert history[0].stored == (True,) * 7 + (False,) * 5
    assert history[1].owners == (0,) * 4 + (FREE,) * 4 + (0,) * 4
    assert history[1].stored == (True,) * 4 + (False,) * 4 + (True,) + (False,) * 3
    assert [each.num_left for each in history] == [3, 2, 2, 1]
    assert history[1].describe() == "1 in flight, 67% of the slots held, 42% used"


def test_after_the_last_step_all_have_left() -> None:
    history = slot_history(LENGTHS, PagedMemory(12, 4, watermark=0), 4)
    assert at_step(history, 2) is history[1]
    after = at_step(history, 5)
    assert (after.step, after.in_flight, after.share_held, after.num_left) == (5, 0, 0, 0)


def test_the_picture_has_each_slots_colour() -> None:
    history = slot_history(LENGTHS, PagedMemory(12, 4, watermark=0), 4)
    figure = draw_slot_maps([history[1]], ["Paged"], columns=8)
    ax = figure.axes[0]
    picture = ax.images[0].get_array()
    assert picture.shape == (2, 8, 3)  # 12 slots, 8 a row
    own = to_rgb(style.sequence_fill(0))
    assert tuple(picture[0, 0]) == own
    assert tuple(picture[0, 4]) == (1, 1, 1)
    assert tuple(picture[1, 0]) == own
    assert tuple(picture[1, 1]) == to_rgb(style.tint(style.sequence_fill(0), 0.3))
    assert tuple(picture[1, 7]) == (1, 1, 1)  # not a slot of the cache
    assert ax.get_title() + ax.get_title(loc="left") == "Paged\n1 sequence, 42% of the slots used"
    plt.close(figure)
