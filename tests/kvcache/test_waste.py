import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.waste import last_block_waste, padding_waste


def test_a_batch_is_padded_to_its_longest_prompt_and_output() -> None:
    # Two rows of 10 + 6 positions; 3 + 6 and 10 + 1 of them serve someone. Then one row alone, without padding.
    waste = padding_waste([(3, 6), (10, 1), (5, 5)], batch_size=2)
    assert (waste.useful, waste.total) == (9 + 11 + 10, 32 + 10)
    assert waste.share == pytest.approx(1 - 30 / 42)


def test_one_row_or_equal_rows_waste_nothing() -> None:
    assert padding_waste([(3, 6), (10, 1)], batch_size=1).share == 0
    assert padding_waste([(4, 6)] * 5, batch_size=3).share == 0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12), st.integers(1, 5))
def test_padding_against_rows_laid_out_one_by_one(lengths: list[tuple[int, int]], batch_size: int) -> None:
    cells = []
    for first in range(0, len(lengths), batch_size):
        batch = lengths[first : first + batch_size]
        for prompt, output in batch:
            row = ["pad"] * (max(p for p, _ in batch) - prompt) + ["token"] * prompt
            row += ["token"] * output + ["pad"] * (max(o for _, o in batch) - output)
            cells += row
    waste = padding_waste(lengths, batch_size)
    assert (waste.useful, waste.total) == (cells.count("token"), len(cells))


def test_paging_wastes_the_rest_of_the_last_block() -> None:
    waste = last_block_waste([(15, 1), (16, 1), (1, 1)], block_size=16)
    assert (waste.useful, waste.total) == (16 + 17 + 2, 16 + 32 + 16)
    assert last_block_waste([(15, 1), (16, 1)], block_size=1).share == 0


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="batch_size=0"):
        padding_waste([(1, 1)], 0)
    with pytest.raises(InvalidArgumentError, match="block_size=0"):
        last_block_waste([(1, 1)], 0)
    for empty in (padding_waste, last_block_waste):
        with pytest.raises(InvalidArgumentError, match="lengths is empty"):
            empty([], 4)
