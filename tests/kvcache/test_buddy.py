import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.buddy import BuddyAllocator, next_power_of_two


def test_next_power_of_two() -> None:
    assert [next_power_of_two(count) for count in (1, 2, 3, 4, 5, 8, 9, 1000)] == [1, 2, 4, 4, 8, 8, 16, 1024]


def test_any_number_of_blocks_divides_into_aligned_runs() -> None:
    assert BuddyAllocator(13).free_runs() == [(0, 8), (8, 4), (12, 1)]
    assert BuddyAllocator(16).free_runs() == [(0, 16)]
    assert BuddyAllocator(1).free_runs() == [(0, 1)]


def test_a_run_is_split_off_and_merges_again() -> None:
    buddies = BuddyAllocator(16)
    start = buddies.allocate(3)
    assert (start, len(buddies)) == (0, 12)
    assert buddies.free_runs() == [(4, 4), (8, 8)]
    # The shortest run that is long enough: the one of 4, not half of the one of 8.
    assert buddies.allocate(4) == 4
    buddies.free_run(0, 4)
    assert buddies.free_runs() == [(0, 4), (8, 8)]
    buddies.free_run(4, 4)
    assert buddies.free_runs() == [(0, 16)]


def test_neighbours_that_are_no_buddies_do_not_merge() -> None:
    buddies = BuddyAllocator(8)
    assert buddies.allocate(8) == 0
    buddies.free_run(2, 2)
    buddies.free_run(4, 2)
    assert buddies.free_runs() == [(2, 2), (4, 2)]
    assert buddies.largest_free_run == 2
    with pytest.raises(InvalidArgumentError, match="the longest is 2"):
        buddies.allocate(3)


def test_one_block_can_be_taken_out_of_the_middle() -> None:
    buddies = BuddyAllocator(8)
    assert buddies.take(5) == 5
    assert buddies.free_runs() == [(0, 4), (4, 1), (6, 2)]
    assert buddies.is_free(0, 4)
    assert not buddies.is_free(4, 4)
    buddies.give(5)
    assert buddies.largest_free_run == 8


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks=0"):
        BuddyAllocator(0)
    buddies = BuddyAllocator(8)
    with pytest.raises(InvalidArgumentError, match="count=0"):
        buddies.allocate(0)
    with pytest.raises(InvalidArgumentError, match="free already"):
        buddies.give(3)
    buddies.take(3)
    with pytest.raises(InvalidArgumentError, match="not all free"):
        buddies.take(3)
    with pytest.raises(InvalidArgumentError, match="free already"):
        buddies.free_run(2, 2)
    for start, length in ((1, 2), (0, 3), (8, 1), (-1, 1), (0, 16), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="is no run"):
            buddies.free_run(start, length)


def test_serves_a_pool_as_its_free_blocks() -> None:
    pool = BlockPool(6, BuddyAllocator(6))
    blocks = pool.take(6)
    assert sorted(blocks) == list(range(6))
    for block in blocks:
        pool.release(block)
    assert pool.num_free == 6
    with pytest.raises(InvalidArgumentError, match="in no table"):
        pool.release(0)


def runs_of(bitmap: list[bool]) -> list[tuple[int, int]]:
    """Divide what is free into the largest aligned runs that are free as a whole, by trying all of them."""
    runs, covered = [], [False] * len(bitmap)
    for length in (1 << order for order in reversed(range(len(bitmap).bit_length()))):
        for start in range(0, len(bitmap) - length + 1, length):
            if all(bitmap[start : start + length]) and not any(covered[start : start + length]):
                covered[start : start + length] = [True] * length
                runs.append((start, length))
    return sorted(runs)


class Buddies(RuleBasedStateMachine):
    """Random allocations and releases, beside a bitmap of what is free."""

    @initialize(num_blocks=st.integers(1, 40))
    def begin(self, num_blocks: int) -> None:
        self.buddies = BuddyAllocator(num_blocks)
        self.free = [True] * num_blocks
        self.held: list[tuple[int, int]] = []

    @rule(count=st.integers(1, 12))
    def allocate(self, count: int) -> None:
        length = next(power for power in (1, 2, 4, 8, 16) if power >= count)
        possible = [run for run in runs_of(self.free) if run[1] >= length]
        if not possible:
            with pytest.raises(InvalidArgumentError):
                self.buddies.allocate(count)
            return
        start = self.buddies.allocate(count)
        assert start % length == 0
        assert all(self.free[start : start + length])
        # It came out of a shortest run that is long enough.
        shortest = min(size for _, size in possible)
        assert any(first <= start < first + size for first, size in possible if size == shortest)
        self.free[start : start + length] = [False] * length
        self.held.append((start, length))

    @rule(data=st.data())
    def take_one(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, len(self.free) - 1))
        if self.free[block]:
            assert self.buddies.take(block) == block
            self.free[block] = False
            self.held.append((block, 1))
        else:
            with pytest.raises(InvalidArgumentError):
                self.buddies.take(block)

    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: st.DataObject, whole: bool) -> None:
        if not self.held:
            return
        start, length = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if whole:
            self.buddies.free_run(start, length)
            self.free[start : start + length] = [True] * length
            return
        # One block out of a run; the others stay held one by one.
        block = data.draw(st.integers(start, start + length - 1))
        self.buddies.give(block)
        self.free[block] = True
        self.held += [(other, 1) for other in range(start, start + length) if other != block]

    @invariant()
    def free_side_is_the_bitmap(self) -> None:
        assert self.buddies.free_runs() == runs_of(self.free)
        assert len(self.buddies) == sum(self.free)
        assert list(self.buddies) == [block for block, free in enumerate(self.free) if free]
        assert self.buddies.largest_free_run == max((length for _, length in runs_of(self.free)), default=0)


TestBuddies = Buddies.TestCase
TestBuddies.settings = settings(max_examples=150, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.randoms())
def test_all_merges_again_in_any_order(num_blocks: int, order: object) -> None:
    buddies = BuddyAllocator(num_blocks)
    before = buddies.free_runs()
    blocks = [buddies.take() for _ in range(num_blocks)]
    assert sorted(blocks) == list(range(num_blocks))
    order.shuffle(blocks)  # type: ignore[attr-defined]
    for block in blocks:
        buddies.give(block)
    assert buddies.free_runs() == before
