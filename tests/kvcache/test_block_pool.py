import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool, FreeQueue


def test_what_became_free_first_goes_out_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    for block in (2, 0):
        pool.release(block)
    assert list(pool.free) == [3, 2, 0]
    assert pool.take(2) == [3, 2]


def test_a_block_is_free_held_or_idle() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_held, pool.num_idle, pool.num_available) == (3, 0, 0, 3)
    [block] = pool.take()
    pool.hold(block)
    pool.pin(block)
    assert (pool.holders(block), pool.pins(block)) == (2, 1)
    assert (pool.num_free, pool.num_held, pool.num_idle, pool.num_available) == (2, 1, 0, 2)
    pool.release(block)
    pool.release(block)
    assert (pool.num_free, pool.num_held, pool.num_idle, pool.num_available) == (2, 0, 1, 3)
    pool.hold(block)
    assert (pool.num_free, pool.num_held, pool.num_idle) == (2, 1, 0)
    pool.release(block)
    pool.unpin(block)
    assert list(pool.free) == [1, 2, block]


def test_the_longest_idle_block() -> None:
    pool = BlockPool(3)
    assert pool.longest_idle is None
    for block in pool.take(3):
        pool.pin(block)
    for block in (1, 2, 0):
        pool.release(block)
    assert pool.longest_idle == 1
    pool.hold(1)
    pool.release(1)
    assert pool.longest_idle == 2


def test_who_listens_may_unpin_a_block_that_becomes_idle() -> None:
    pool = BlockPool(2)
    told: list[int] = []

    def give_up(block: int) -> None:
        told.append(block)
        pool.unpin(block)

    pool.on_idle = give_up
    for block in pool.take(2):
        pool.hold(block)
    pool.pin(0)
    for block in (0, 1, 1, 0):
        pool.release(block)
    assert told == [0]
    assert list(pool.free) == [1, 0]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.take(3), "count=3 is more than the 2 free blocks"),
        (lambda pool: pool.hold(2), "block=2 is free"),
        (lambda pool: pool.pin(2), "block=2 is free"),
        (lambda pool: pool.release(2), "block=2 is in no table"),
        (lambda pool: pool.unpin(0), "block=0 has no pin"),
        (lambda pool: BlockPool(0), "num_blocks=0"),
    ],
)
def test_misuse_is_named_and_changes_nothing(misuse, message: str) -> None:
    pool = BlockPool(3)
    pool.take()
    with pytest.raises(InvalidArgumentError, match=message):
        misuse(pool)
    assert list(pool.free) == [1, 2]
    assert [pool.holders(block) + pool.pins(block) for block in range(3)] == [1, 0, 0]


def test_a_move_takes_holders_and_pins_along() -> None:
    pool = BlockPool(5)
    pool.take(5)
    pool.hold(1)
    for block in (2, 3):
        pool.pin(block)
        pool.release(block)
    pool.release(0)  # free; 1 is held twice, 2 and 3 are idle, 4 is held once
    assert pool.take() == [0]  # as a destination
    pool.move({1: 0, 3: 1, 2: 3})
    assert [pool.holders(block) for block in range(5)] == [2, 0, 0, 0, 1]
    assert [pool.pins(block) for block in range(5)] == [0, 1, 0, 1, 0]
    assert list(pool.free) == [2]
    assert pool.longest_idle == 3  # where the content of 2 is, which became idle first


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_against_counts(data: st.DataObject) -> None:
    """Random valid calls; a block is free exactly when nobody holds or pins it."""
    num_blocks = data.draw(st.integers(1, 5))
    pool = BlockPool(num_blocks, FreeQueue(num_blocks))
    holders, pins = [0] * num_blocks, [0] * num_blocks
    for call, block in data.draw(st.lists(st.tuples(st.sampled_from("thrpu"), st.integers(0, 4)), max_size=40)):
        block %= num_blocks
        used = bool(holders[block] + pins[block])
        if call == "t" and pool.num_free:
            [taken] = pool.take()
            assert not holders[taken] + pins[taken]
            holders[taken] = 1
        elif call == "h" and used:
            pool.hold(block)
            holders[block] += 1
        elif call == "r" and holders[block]:
            pool.release(block)
            holders[block] -= 1
        elif call == "p" and used:
            pool.pin(block)
            pins[block] += 1
        elif call == "u" and pins[block]:
            pool.unpin(block)
            pins[block] -= 1
        assert [pool.holders(b) for b in range(num_blocks)] == holders
        assert [pool.pins(b) for b in range(num_blocks)] == pins
        assert sorted(pool.free) == [b for b in range(num_blocks) if not holders[b] + pins[b]]
        assert pool.num_idle == sum(1 for b in range(num_blocks) if pins[b] and not holders[b])
        assert pool.num_held == sum(1 for count in holders if count)
