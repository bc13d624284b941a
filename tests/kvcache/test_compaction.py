import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.compaction import Run, by_size, loose_blocks, pack, pack_in_order, relocate


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4, 8, 3, 5, 6, 7]), max_size=12))
def test_runs_sorted_by_size_are_packed_without_gaps_and_aligned(lengths: list[int]) -> None:
    runs = [Run((100 + i,), length) for i, length in enumerate(lengths)]
    order = by_size(runs)
    starts, moves = pack(order)
    assert sorted(order, key=lambda run: run.blocks) == runs
    slots = [block for start, run in zip(starts, order, strict=True) for block in range(start, start + run.length)]
    assert slots == list(range(sum(lengths)))
    for start, run in zip(starts, order, strict=True):
        assert moves[run.blocks[0]] == start
        if run.length in (1, 2, 4, 8):
            assert start % run.length == 0


def test_what_lies_right_does_not_move() -> None:
    starts, moves = pack([Run((0, 1), 4), Run((4, 6), 2)])
    assert starts == [0, 4]
    assert moves == {6: 5}


def test_moves_may_overlap_and_their_sources_become_free() -> None:
    pool = BlockPool(5)
    pool.take(5)
    pool.release(0)
    pool.release(2)
    pool.hold(1)
    pool.pin(4)
    pool.release(4)
    # 1 -> 0, 3 -> 1 (where 1 was), 4 -> 2.
    asked = []

    def move(moves: object) -> None:
        asked.append(moves)
        pool.move(moves)  # type: ignore[arg-type]

    relocate(pool, {1: 0, 3: 1, 4: 2}, move)
    assert asked == [{1: 0, 3: 1, 4: 2}]
    assert [pool.holders(block) for block in range(5)] == [2, 1, 0, 0, 0]
    assert [pool.pins(block) for block in range(5)] == [0, 0, 1, 0, 0]
    assert (pool.num_free, pool.num_idle, sorted(pool.free)) == (2, 1, [3, 4])


def test_a_swap_of_two_blocks_frees_nothing() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.hold(0)
    relocate(pool, {0: 1, 1: 0}, pool.move)
    assert [pool.holders(0), pool.holders(1)] == [1, 2]
    assert pool.num_free == 0


def test_nothing_to_move_asks_for_nothing() -> None:
    pool = BlockPool(2)
    relocate(pool, {}, pytest.fail)
    assert pool.num_free == 2


def test_loose_blocks_come_in_the_order_of_the_tokens_and_once() -> None:
    pool = BlockPool(8)
    pool.take(8)
    pool.release(1)
    tables = [BlockTable(4, [5, NO_BLOCK, 3]), BlockTable(4, [5, 2])]
    # 0, 4, 6, 7 are held by something that is no table: a copy on write under way, say.
    assert loose_blocks(pool, tables, [3]) == [5, 2, 0, 4, 6, 7]


def test_packed_tables_lie_one_behind_the_other_and_the_last_one_before_what_is_free() -> None:
    pool = BlockPool(8)
    pool.take(8)
    for block in (0, 3, 7):
        pool.release(block)
    first, second = BlockTable(4, [6, 1]), BlockTable(4, [5, NO_BLOCK, 2])
    pool.pin(4)
    pool.release(4)
    moves = pack_in_order(pool, [first, second])
    assert [moves.get(block, block) for block in (6, 1, 5, 2, 4)] == [0, 1, 2, 3, 4]
    moves = pack_in_order(pool, [first, second], last=first)
    assert [moves.get(block, block) for block in (5, 2, 4, 6, 1)] == [0, 1, 2, 3, 4]
