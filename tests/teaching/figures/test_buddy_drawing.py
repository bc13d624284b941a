import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from vllm_teach.kvcache.buddy import BuddyAllocator
from vllm_teach.teaching.figures.buddy_drawing import Buddy, BuddyView, draw_buddies, view_buddies


def test_a_run_of_two_splits_all_above_it() -> None:
    allocator = BuddyAllocator(8)
    allocator.take_run(2, 2)
    view = view_buddies(allocator)
    assert view == BuddyView(
        8,
        (
            Buddy(3, 0, "split"),
            Buddy(2, 0, "split"),
            Buddy(2, 4, "free"),
            Buddy(1, 0, "free"),
            Buddy(1, 2, "taken"),
        ),
        6,
        4,
    )
    assert view.fragmentation == pytest.approx(1 / 3)


def test_all_free_and_all_taken() -> None:
    allocator = BuddyAllocator(6)  # a run of 4 and one of 2
    assert view_buddies(allocator).runs == (Buddy(2, 0, "free"), Buddy(1, 4, "free"))
    allocator.take_run(0, 4)
    allocator.take_run(4, 2)
    view = view_buddies(allocator)
    assert view.runs == (Buddy(2, 0, "taken"), Buddy(1, 4, "taken"))
    assert view.fragmentation == 0


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_what_is_not_split_is_every_block_once(num_blocks: int, taken: set[int]) -> None:
    allocator = BuddyAllocator(num_blocks)
    for block in sorted(taken):
        if block < num_blocks:
            allocator.take(block)
    runs = [run for run in view_buddies(allocator).runs if run.state != "split"]
    states = {block: run.state for run in runs for block in range(run.start, run.start + run.length)}
    assert sum(run.length for run in runs) == num_blocks
    assert states == {block: "taken" if block in taken else "free" for block in range(num_blocks)}


def test_it_is_drawn_to_scale() -> None:
    allocator = BuddyAllocator(16)
    allocator.take_run(4, 1)
    allocator.take_run(8, 8)
    view = view_buddies(allocator)
    figure = draw_buddies(view)
    boxes = {patch.get_gid(): patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)}
    whole = boxes["split 0 16"].get_width()
    for run in view.runs:
        box = boxes[f"{run.state} {run.start} {run.length}"]
        assert box.get_width() == pytest.approx(whole * run.length / 16)
        assert box.get_x() - boxes["split 0 16"].get_x() == pytest.approx(whole * run.start / 16)
    assert boxes["free 0 4"].get_y() < boxes["taken 8 8"].get_y()
    assert len(figure.axes[0].patches) == len(view.runs) + 16
    assert figure.axes[0].texts[0].get_text() == "7 of 16 blocks are free, but the longest run has 4"
    plt.close(figure)
