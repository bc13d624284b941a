import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.teaching.figures.block_table_drawing import LogicalBlock, TableView, draw_tables, view_tables


def forked() -> TableView:
    """A of 10 tokens in blocks of 4, and a fork of it that has written an eleventh."""
    kv = KVCacheManager(8, 4, prefix_cache=None)
    kv.begin(0, range(10))
    kv.extend(0, 10)
    kv.commit(0, 10, lambda start, count: range(start, start + count))
    kv.fork(0, 1)
    kv.fork(0, 2)
    kv.extend(1, 11)
    return view_tables({"A": kv.table(0), "B": kv.table(1), "C": kv.table(2)}, 8, kv.take_transfers())


def test_the_tables_of_a_fork_after_its_first_write() -> None:
    view = forked()
    assert view.sequences == ("A", "B", "C")
    assert [(e.index, e.physical, e.filled) for e in view.logical if e.sequence == "A"] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 2, 2),
    ]
    assert [(e.index, e.physical, e.filled) for e in view.logical if e.sequence == "B"] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 3, 3),
    ]
    assert view.references == (3, 3, 2, 1, 0, 0, 0, 0)
    assert view.copies == ((2, 3),)
    assert (view.owner(0), view.owner(3), view.owner(4)) == ("A", "B", None)
    assert (view.filled(2), view.filled(3), view.filled(4)) == (2, 3, 0)


def test_only_copies_are_copies_and_given_back_blocks_are_left_out() -> None:
    table = BlockTable(4, [NO_BLOCK, 2], 6)
    transfers = [Transfer("move", ((0, 1),)), Transfer("copy", ((2, 3), (4, 5))), Transfer("swap_out", ((6, 0),))]
    view = view_tables({"A": table}, 7, transfers)
    assert view.logical == (LogicalBlock("A", 1, 2, 2),)
    assert view.copies == ((2, 3), (4, 5))


def test_cells_are_filled_to_scale_and_lines_join_index_and_block() -> None:
    view = forked()
    figure = draw_tables(view)
    [ax] = figure.axes
    texts = [text.get_text() for text in ax.texts]
    assert {"0→0", "1→1", "2→2", "2→3", "A", "B", "C", "physical", "references", "copy on write"} <= set(texts)
    widths = [patch.get_width() for patch in ax.patches if isinstance(patch, Rectangle)]
    cell = max(widths)
    # In every cell an empty background, the filled part, and the border; a shared block has a border more.
    cells = len(view.logical) + 8
    assert widths.count(cell) == 2 * cells + sum(each.filled == 4 for each in view.logical) + 2
    assert sum(width == pytest.approx(3 / 4 * cell) for width in widths) == 2  # B's block 2, and block 3
    assert len(ax.lines) == len(view.logical)
    starts = {round(float(line.get_xdata()[0]), 6) for line in ax.lines}
    assert len(starts) == len(view.logical)  # no line hides another
    assert sum(isinstance(patch, FancyArrowPatch) for patch in ax.patches) == 1
    plt.close(figure)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, r"block sizes \[\]"),
        ({"A": BlockTable(4), "B": BlockTable(8)}, r"block sizes \[4, 8\]"),
        ({"A": BlockTable(4, [9], 1)}, "num_blocks=4 is too few: 'A' holds block 9"),
    ],
)
def test_tables_that_cannot_be_drawn(tables: dict[str, BlockTable], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        view_tables(tables, 4)
