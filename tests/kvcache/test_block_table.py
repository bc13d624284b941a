import pytest

from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable, put_between_holes, without_holes


def test_slots_of_positions() -> None:
    table = BlockTable(4, [7, 2, 5], 10)
    assert [table.slot(position) for position in range(10)] == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]


@pytest.mark.parametrize(
    ("blocks", "contiguous"),
    [
        ([], True),
        ([5], True),
        ([5, 6, 7], True),
        ([5, 7], False),
        ([7, 6], False),
        ([5, 6, 6], False),
        ([NO_BLOCK, 0, 1], False),  # though -1, 0, 1 follow one another
        ([NO_BLOCK], False),
    ],
)
def test_contiguous(blocks: list[int], contiguous: bool) -> None:
    assert BlockTable(4, blocks).contiguous is contiguous


def test_tables_share_no_lists() -> None:
    first, second = BlockTable(4), BlockTable(4)
    first.blocks.append(1)
    first.spare.append(2)
    assert (second.blocks, second.spare) == ([], [])


def test_holes_are_taken_out_and_put_back() -> None:
    blocks = [NO_BLOCK, 3, NO_BLOCK, NO_BLOCK, 0, 9]
    assert without_holes(blocks) == [3, 0, 9]
    assert put_between_holes(blocks, [10, 11, 12]) == [NO_BLOCK, 10, NO_BLOCK, NO_BLOCK, 11, 12]
