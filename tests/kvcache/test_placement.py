import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable
from vllm_teach.kvcache.placement import PLACEMENTS, make_placement


class Memory:
    """A placement with tables and a memory of one word a block; checks each move and carries it out."""

    def __init__(self, placement: str, num_blocks: int, *, compact_above: float = 0.5) -> None:
        self.tables: list[BlockTable] = []
        self.words: list[object] = [None] * num_blocks
        self.pinned: list[int] = []
        self.held_aside: list[int] = []
        self.num_moved = 0
        self.placement = make_placement(
            placement, num_blocks, lambda: self.tables, self._move, compact_above=compact_above
        )
        self.pool = self.placement.pool

    def _move(self, moves: Mapping[int, int]) -> None:
        assert len(set(moves.values())) == len(moves)
        assert all(source != destination for source, destination in moves.items())
        in_use = {block for block in range(self.pool.num_blocks) if self.in_use(block)}
        assert set(moves) <= in_use
        assert not (set(moves.values()) - set(moves)) & in_use
        before = list(self.words)
        for source, destination in moves.items():
            self.words[destination] = before[source]
        self.pool.move(moves)
        for blocks in (self.pinned, self.held_aside, *(part for t in self.tables for part in (t.blocks, t.spare))):
            blocks[:] = [moves.get(block, block) for block in blocks]
        self.num_moved += len(moves)

    def in_use(self, block: int) -> bool:
        """Whether a table, a pin or a copy on write needs what is in `block`; spare blocks hold nothing yet."""
        return block in (
            *self.pinned,
            *self.held_aside,
            *(b for table in self.tables for b in table.blocks + table.spare),
        )

    def new(self) -> BlockTable:
        self.tables.append(BlockTable(16))
        return self.tables[-1]

    def extend(self, table: BlockTable, count: int) -> bool:
        """Extend and write to the new blocks; check the promise of `blocks_to_extend`."""
        cost, free, old = self.placement.blocks_to_extend(table, count), self.pool.num_free, len(table.blocks)
        state = repr((self.tables, self.words))
        done = self.placement.extend(table, count)
        assert done == (cost <= free)
        assert self.pool.num_free == free - cost * done
        if done:
            assert len(table.blocks) == old + count
            for block in table.blocks[old:]:
                self.words[block] = object()
        else:
            assert repr((self.tables, self.words)) == state
        return done

    def free(self, table: BlockTable) -> None:
        self.tables.remove(table)
        for block in table.blocks + table.spare:
            if block != NO_BLOCK:
                self.pool.release(block)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_new_table_is_contiguous_in_an_empty_pool(placement: str) -> None:
    memory = Memory(placement, 16)
    table = memory.new()
    assert memory.extend(table, 3)
    assert table.contiguous
    assert len(table.spare) == (1 if placement == "contiguous" else 0)


def test_scattered_takes_what_has_been_free_for_longest() -> None:
    memory = Memory("scattered", 6)
    first, second = memory.new(), memory.new()
    memory.extend(first, 2)
    memory.extend(second, 2)
    memory.free(first)
    memory.extend(second, 4)
    assert second.blocks == [2, 3, 4, 5, 0, 1]
    assert memory.num_moved == 0


def test_contiguous_grows_into_spare_then_buddy_then_elsewhere() -> None:
    memory = Memory("contiguous", 32)
    table = memory.new()
    memory.extend(table, 3)
    assert (table.blocks, table.spare) == ([0, 1, 2], [3])
    assert memory.placement.blocks_to_extend(table, 1) == 0
    memory.extend(table, 1)
    assert memory.placement.blocks_to_extend(table, 1) == 4
    memory.extend(table, 1)
    assert (table.blocks, table.spare) == ([0, 1, 2, 3, 4], [5, 6, 7])
    assert memory.num_moved == 0
    # The buddy of its run, 8 to 15, is in use: it moves to a run of 16.
    neighbour = memory.new()
    memory.extend(neighbour, 1)
    assert neighbour.blocks == [8]
    memory.extend(table, 4)
    assert (table.blocks, table.spare) == (list(range(16, 25)), list(range(25, 32)))
    assert memory.num_moved == 5
    assert memory.pool.num_free == 32 - 16 - 1


def test_contiguous_compacts_when_enough_is_free_but_no_run() -> None:
    memory = Memory("contiguous", 8)
    tables = [memory.new() for _ in range(4)]
    for table in tables:
        memory.extend(table, 2)
    memory.free(tables[0])
    memory.free(tables[2])
    # 2 + 2 blocks are free, in two places.
    table = memory.new()
    words = [memory.words[block] for kept in (tables[1], tables[3]) for block in kept.blocks]
    assert memory.extend(table, 4)
    assert table.blocks == [0, 1, 2, 3]
    assert [memory.words[block] for kept in (tables[1], tables[3]) for block in kept.blocks] == words
    assert (tables[1].blocks, tables[3].blocks) == ([4, 5], [6, 7])


def test_a_run_and_its_spare_stay_together_when_others_make_it_move() -> None:
    memory = Memory("contiguous", 16)
    tables = [memory.new() for _ in range(4)]
    for table in tables:
        memory.extend(table, 3)
    memory.free(tables[0])
    memory.free(tables[2])
    assert memory.extend(memory.new(), 8)
    assert memory.num_moved > 0
    for table in (tables[1], tables[3]):
        held = table.blocks + table.spare
        assert held == list(range(held[0], held[0] + 4))


def test_a_run_grows_into_its_buddy_only_not_into_what_is_behind_it() -> None:
    memory = Memory("contiguous", 32)
    first, second = memory.new(), memory.new()
    memory.extend(first, 8)
    memory.extend(second, 8)
    assert second.blocks[0] == 8
    # 16 to 23 are free, but the buddy of 8 to 15 is 0 to 7.
    memory.extend(second, 1)
    assert second.blocks == list(range(16, 25))


def test_contiguous_grows_where_half_of_the_pool_is_its_own() -> None:
    memory = Memory("contiguous", 8)
    first, second = memory.new(), memory.new()
    memory.extend(first, 1)
    memory.extend(second, 4)
    memory.free(first)
    assert memory.extend(second, 1)
    assert second.contiguous
    assert second.blocks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 11, 16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_sequence_alone_grows_to_max_blocks_and_not_beyond(placement: str, num_blocks: int) -> None:
    memory = Memory(placement, num_blocks)
    table = memory.new()
    expected = max(2**k for k in range(5) if 2**k <= num_blocks) if placement == "contiguous" else num_blocks
    assert memory.placement.max_blocks == expected
    for _ in range(expected):
        assert memory.extend(table, 1)
    assert not memory.extend(table, 1)


def test_blocks_of_a_prefix_hit_join_the_run_when_it_would_not_fit_beside_them() -> None:
    memory = Memory("contiguous", 8)
    table = memory.new()
    # Three cached blocks in three places, held by this table alone.
    for block in (1, 3, 6):
        memory.pool.claim([memory.pool.free.take(block)])  # type: ignore[call-arg]
        table.blocks.append(block)
    words = [object() for _ in table.blocks]
    for block, word in zip(table.blocks, words, strict=True):
        memory.words[block] = word
    assert memory.extend(table, 5)
    assert table.blocks == list(range(8))
    assert memory.words[:3] == words


def test_given_back_blocks_do_not_stop_a_window_from_sliding_for_ever() -> None:
    memory = Memory("contiguous", 8)
    table = memory.new()
    for step in range(100):
        assert memory.extend(table, 1)
        if step >= 4:
            memory.pool.release(table.blocks[step - 4])
            table.blocks[step - 4] = NO_BLOCK
    # The first block stays: an attention sink. 1 + a run of 8 would be too much, a run of 8 with it is not.
    memory = Memory("contiguous", 8)
    table = memory.new()
    for step in range(100):
        assert memory.extend(table, 1)
        if step >= 5:
            memory.pool.release(table.blocks[step - 4])
            table.blocks[step - 4] = NO_BLOCK


def test_prefer_contiguous_follows_its_last_block_and_falls_back() -> None:
    memory = Memory("prefer_contiguous", 8, compact_above=1.0)
    first, second = memory.new(), memory.new()
    memory.extend(first, 2)
    memory.extend(second, 2)
    assert (first.blocks, second.blocks) == ([0, 1], [2, 3])
    memory.extend(second, 1)
    assert second.blocks == [2, 3, 4]
    memory.extend(first, 1)
    assert first.blocks == [0, 1, 5]
    memory.free(second)
    # 2 to 4 and 6, 7 are free: it goes on behind its last block, then anywhere.
    memory.extend(first, 5)
    assert first.blocks[:5] == [0, 1, 5, 6, 7]
    assert sorted(first.blocks) == list(range(8))
    assert memory.num_moved == 0


def test_prefer_contiguous_takes_a_run_that_is_just_long_enough_rather_than_single_blocks() -> None:
    memory = Memory("prefer_contiguous", 8, compact_above=1.0)
    tables = [memory.new() for _ in range(8)]
    for table in tables:
        memory.extend(table, 1)
    for number in (1, 4, 5):
        memory.free(tables[number])
    table = memory.new()
    memory.extend(table, 2)
    assert table.blocks == [4, 5]


def test_prefer_contiguous_compacts_above_its_threshold() -> None:
    def fragmented(compact_above: float) -> tuple[Memory, BlockTable]:
        memory = Memory("prefer_contiguous", 9, compact_above=compact_above)
        tables = [memory.new() for _ in range(9)]
        for table in tables:
            memory.extend(table, 1)
        for table in (tables[0], tables[2], tables[4]):
            memory.free(table)
        return memory, tables[1]

    # Three free blocks in three places: one is behind its last block, then half of the free ones are apart.
    memory, table = fragmented(0.5)
    memory.extend(table, 2)
    assert memory.num_moved == 0
    memory, table = fragmented(0.4)
    memory.extend(table, 3)
    assert memory.num_moved > 0
    assert table.contiguous
    assert len(table.blocks) == 4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unknown_names_are_refused(placement: str) -> None:
    with pytest.raises(InvalidArgumentError, match="scattered, contiguous, prefer_contiguous"):
        make_placement(placement + "ly", 8, list, lambda moves: None)


class Placements(RuleBasedStateMachine):
    """Random growth, sharing, copies on write, pins, windows, ends and compactions on a small pool."""

    @initialize(
        placement=st.sampled_from(PLACEMENTS), num_blocks=st.integers(1, 24), compact_above=st.sampled_from([0, 0.5, 1])
    )
    def begin(self, placement: str, num_blocks: int, compact_above: float) -> None:
        self.kind = placement
        self.memory = Memory(placement, num_blocks, compact_above=compact_above)
        self.expected: dict[int, list[object]] = {}
        self.random = random.Random(num_blocks)

    def pick(self, number: int) -> BlockTable | None:
        tables = self.memory.tables
        return tables[number % len(tables)] if tables else None

    def remember(self, table: BlockTable) -> None:
        words = self.memory.words
        self.expected[id(table)] = [None if block == NO_BLOCK else words[block] for block in table.blocks]

    @rule(count=st.integers(0, 9))
    def add(self, count: int) -> None:
        table = self.memory.new()
        if count:
            self.memory.extend(table, count)
        self.remember(table)

    @rule(number=st.integers(0, 9), count=st.integers(1, 5))
    def grow(self, number: int, count: int) -> None:
        table = self.pick(number)
        if table is None or not self.memory.extend(table, count):
            return
        self.remember(table)
        if self.kind == "contiguous":
            tail = [*table.blocks[-count:], *table.spare]
            shared = [block for block in table.blocks if block != NO_BLOCK and self.memory.pool.holders(block) > 1]
            assert tail == list(range(tail[0], tail[0] + len(tail)))
            if not shared and NO_BLOCK not in table.blocks and len(tail) == len(table.blocks) + len(table.spare):
                assert len(tail) & (len(tail) - 1) == 0

    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        if parent is None:
            return
        child = self.memory.new()
        child.blocks[:] = parent.blocks
        for block in child.blocks:
            if block != NO_BLOCK:
                self.memory.pool.hold(block)
        self.remember(child)

    @rule(number=st.integers(0, 9))
    def copy_on_write(self, number: int) -> None:
        table = self.pick(number)
        if table is None or not table.blocks:
            return
        source = table.blocks.pop()
        self.memory.held_aside.append(source)
        done = self.memory.extend(table, 1)
        source = self.memory.held_aside.pop()
        if done:
            self.memory.words[table.blocks[-1]] = self.memory.words[source]
            self.memory.pool.release(source)
        else:
            table.blocks.append(source)
        self.remember(table)

    @rule(number=st.integers(0, 9), logical=st.integers(0, 20))
    def give_back(self, number: int, logical: int) -> None:
        table = self.pick(number)
        if table is not None and logical + 1 < len(table.blocks) and table.blocks[logical] != NO_BLOCK:
            self.memory.pool.release(table.blocks[logical])
            table.blocks[logical] = NO_BLOCK
            self.remember(table)

    @rule(number=st.integers(0, 9), logical=st.integers(0, 20))
    def pin(self, number: int, logical: int) -> None:
        table = self.pick(number)
        if table is not None and logical < len(table.blocks) and table.blocks[logical] != NO_BLOCK:
            self.memory.pool.pin(table.blocks[logical])
            self.memory.pinned.append(table.blocks[logical])

    @rule()
    def unpin(self) -> None:
        if self.memory.pinned:
            self.memory.pool.unpin(self.memory.pinned.pop(0))

    @rule()
    def hit(self) -> None:
        """A new table begins with what is pinned."""
        blocks = list(dict.fromkeys(self.memory.pinned))
        if blocks:
            table = self.memory.new()
            table.blocks[:] = blocks
            for block in blocks:
                self.memory.pool.hold(block)
            self.remember(table)

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        table = self.pick(number)
        if table is not None:
            self.memory.free(table)

    @rule()
    def compact(self) -> None:
        moved = self.memory.num_moved
        free = self.memory.pool.num_free
        assert self.memory.placement.compact() == self.memory.num_moved - moved
        assert sorted(self.memory.pool.free) == list(
            range(self.memory.pool.num_blocks - free, self.memory.pool.num_blocks)
        )

    @invariant()
    def holders_are_occurrences_and_nothing_is_lost(self) -> None:
        memory = self.memory
        held = Counter(b for table in memory.tables for b in table.blocks + table.spare if b != NO_BLOCK)
        pins = Counter(memory.pinned)
        for block in range(memory.pool.num_blocks):
            assert (memory.pool.holders(block), memory.pool.pins(block)) == (held[block], pins[block])
        assert sorted(memory.pool.free) == [b for b in range(memory.pool.num_blocks) if not held[b] + pins[b]]
        assert memory.pool.num_idle == len(set(pins) - set(held))

    @invariant()
    def every_table_reads_what_was_written(self) -> None:
        for table in self.memory.tables:
            words = [None if block == NO_BLOCK else self.memory.words[block] for block in table.blocks]
            assert words == self.expected[id(table)]


TestPlacements = Placements.TestCase
TestPlacements.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
