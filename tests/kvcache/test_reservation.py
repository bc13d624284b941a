import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.reservation import RESERVATIONS, ContiguousKVCacheManager, reserved_slots


def test_budget_is_counted_in_bytes():
    manager = ContiguousKVCacheManager(capacity_bytes=1000, bytes_per_token=96)
    assert manager.num_slots == 10
    manager.allocate(1, 4)
    assert manager.bytes_held == 384
    assert manager.usage == 0.4


def test_first_fit_and_joining_of_gaps():
    manager = ContiguousKVCacheManager(10, 1)
    assert [manager.allocate(seq_id, 3).first_slot for seq_id in (1, 2, 3)] == [0, 3, 6]
    assert not manager.can_allocate(3)
    manager.free(1)
    manager.free(3)
    # 3 free at the start and 4 at the end are no run of 7: external fragmentation.
    assert manager.longest_free_run == 4
    assert not manager.can_allocate(5)
    manager.free(2)
    assert manager.longest_free_run == 10
    assert manager.allocate(4, 10).first_slot == 0


def test_utilization_is_stored_over_held():
    manager = ContiguousKVCacheManager(100, 1)
    assert manager.utilization == 1.0
    manager.allocate(1, 40)
    manager.store(1, 10)
    assert manager.utilization == 0.25
    assert (manager.tokens_stored, manager.slots_held) == (10, 40)


def test_refusals():
    manager = ContiguousKVCacheManager(10, 1)
    manager.allocate(1, 4)
    with pytest.raises(InvalidArgumentError, match="once"):
        manager.allocate(1, 2)
    with pytest.raises(InvalidArgumentError, match="longest is 6"):
        manager.allocate(2, 7)
    with pytest.raises(InvalidArgumentError, match="at least one slot"):
        manager.allocate(3, 0)
    manager.store(1, 4)
    with pytest.raises(InvalidArgumentError, match="does not fit behind 4 of 4"):
        manager.store(1, 1)
    with pytest.raises(InvalidArgumentError, match="holds no token"):
        ContiguousKVCacheManager(10, 11)


def test_freeing_twice_frees_once():
    manager = ContiguousKVCacheManager(10, 1)
    manager.allocate(1, 4)
    manager.free(1)
    manager.free(1)
    assert manager.longest_free_run == 10


class Manager(RuleBasedStateMachine):
    """Random allocate, store and free, beside a model that marks every single slot."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.manager = ContiguousKVCacheManager(40, 1)
        self.owner = [None] * 40
        self.next_id = 0

    @rule(target=sequences, num_slots=st.integers(1, 15))
    def allocate(self, num_slots):
        text = "".join("." if owner is None else "#" for owner in self.owner)
        place = text.find("." * num_slots)
        assert self.manager.can_allocate(num_slots) == (place >= 0)
        self.next_id += 1
        if place >= 0:
            held = self.manager.allocate(self.next_id, num_slots)
            assert (held.first_slot, held.num_slots) == (place, num_slots)
            self.owner[place : place + num_slots] = [self.next_id] * num_slots
        return self.next_id

    @precondition(lambda self: any(self.owner))
    @rule(seq_id=sequences, share=st.floats(0, 1))
    def store(self, seq_id, share):
        if seq_id in self.owner:
            held = self.manager.reservation(seq_id)
            self.manager.store(seq_id, int(share * (held.num_slots - held.num_stored)))
            assert held.num_stored <= held.num_slots

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id):
        self.manager.free(seq_id)
        self.owner = [None if owner == seq_id else owner for owner in self.owner]

    @invariant()
    def slots_are_held_by_who_got_them(self):
        assert self.manager.slots_held == sum(owner is not None for owner in self.owner)
        runs = "".join("." if owner is None else "#" for owner in self.owner).split("#")
        assert self.manager.longest_free_run == max(map(len, runs))
        assert 0 <= self.manager.utilization <= 1


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=150, deadline=None)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms())
def test_nothing_is_held_after_all_ended_in_any_order(lengths, order):
    manager = ContiguousKVCacheManager(72, 1)
    for seq_id, length in enumerate(lengths):
        manager.allocate(seq_id, length)
    ids = list(range(len(lengths)))
    order.shuffle(ids)
    for seq_id in ids:
        manager.free(seq_id)
    assert manager.slots_held == manager.tokens_stored == 0
    assert manager.longest_free_run == 72


def test_what_each_rule_reserves():
    # The example of Kwon et al. 2023, section 6.1: 32 positions for an output of 25.
    assert [reserved_slots(rule, 100, 25, 2048) for rule in RESERVATIONS] == [2048, 132, 125]
    # A power of two stays what it is, and nobody reserves more than the model can use.
    assert reserved_slots("power_of_two", 100, 32, 2048) == 132
    assert reserved_slots("power_of_two", 100, 33, 140) == 140


def test_reservations_refused():
    for prompt_len, output_len in ((0, 5), (5, 0), (2000, 49)):
        with pytest.raises(InvalidArgumentError, match=f"prompt_len={prompt_len}, output_len={output_len}"):
            reserved_slots("max", prompt_len, output_len, 2048)
    with pytest.raises(InvalidArgumentError, match="reservation='guess' is not known: give one of max, power_of_two"):
        reserved_slots("guess", 1, 1, 8)
